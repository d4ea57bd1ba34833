"""
RPT with a retriever that is trained first, then frozen: DPR and Contriever, baselines of RPT and
DRT.

    Vladimir Karpukhin et al., "Dense Passage Retrieval for Open-Domain Question Answering", EMNLP
    2020, arXiv:2004.04906;  RPT, App. C
    Gautier Izacard et al., "Unsupervised Dense Information Retrieval with Contrastive Learning",
    TMLR 2022, arXiv:2112.09118;  RPT_contriever of DRT, §4.1

It starts from rpt.py. The retriever has embeddings of its own and reads the tokens of a chunk, not
the states of the decoder. It is trained first, with a contrastive loss: a chunk has at most one
other chunk as its positive, whose score must be above those of all other chunks of a micro-batch.

Where this differs from the papers
    Both        The encoder is the Retriever of rpt.py on new embeddings, trained on the same
                documents (papers: BERT). Scores are divided by sqrt(C). Negatives are all other
                chunks of the micro-batch, also padding; on `code` about half are chunks of the
                query's own document, for DPR its target, too (papers: positives and negatives of
                other queries, mostly of other documents).
    DPR         The positive is the first chunk by BM25, as in RPT's App. C, for a chunk and its
                target, as in RPT's §3.2 (App. C does not name the query; DPR: the passage with the
                answer). There are no hard negatives (App. C: the fifth chunk by BM25). Queries and
                passages have one encoder, then W_Q and W_K (DPR: two encoders). RPT is trained with
                it, by L_LM alone: no teacher chooses neighbors, and the flags of the teacher and of
                L_ret have no effect. (RPT, §5.3: RPT is trained with another retriever, and DPR
                takes its place only at test time. `ranks` in rpt.py does that, too.)
    Contriever  The positive is the chunk before (paper: another span of the document). There is no
                queue of negatives and no momentum encoder. W_Q and W_K differ (paper: queries and
                keys have one encoder). DRT, App. A.6, takes Contriever as published, with the
                cosine.

Letters as in rpt.py

With n_inner 640 there are, without the frozen retriever, as many parameters as in RETRO of README's
table.

    $ python train.py --model dense --n-inner 640
    $ python train.py --model dense --retriever contriever --n-inner 640
"""
import math
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed
from torch import nn

import rpt
from rpt import (RPT, Retriever, RPTConfig, bm25_candidates, corpus_idf, doc_of_chunks, in_chunks,
                 init_weights, permitted, warn_if_too_short)


@dataclass
class DenseConfig(RPTConfig):
    retriever: Literal['dpr', 'contriever'] = 'dpr'     # which chunks it is trained to find
    reference_steps: int = 300              # micro-batches that train the retriever, first


PRESETS = rpt.PRESETS
TRAINED = dict(dpr=1, contriever=2)     # values of is_trained; 0: not yet


class DenseRetriever(nn.Module):
    """Queries and keys of chunks from their tokens alone"""
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.n_embd)
        self.retriever = Retriever(config)
        self.register_buffer('is_trained', torch.zeros(()))         # see TRAINED, setup

    def forward(self, chunks):
        """chunks (B, N, m) of tokens -> queries and keys, 2 x (B, N, C)"""
        _, query, key = self.retriever(self.embedding(chunks))
        return query, key


class Dense(RPT):
    """RPT, whose retriever reads tokens, no states of the decoder. What is overridden: see RPT"""
    def __init__(self, config):
        super().__init__(config)
        seed = torch.randint(2 ** 48, (), device='cpu').item()
        self.retriever = DenseRetriever(config)
        init_weights(self.retriever, seed)
        self.retriever.requires_grad_(False)

    def queries_and_keys(self, chunk_states, chunk_tokens):
        """As in RPT; the states that are retrieved are those of the lower layers."""
        query, key = self.retriever(chunk_tokens)
        return chunk_states, query, key


def positives(chunks, doc, config, idf):
    """The positive of each chunk, at most one: chunks (B, N, m), doc (B, N) -> (B, N, N) bool"""
    if config.retriever == 'dpr':
        # the first chunk by BM25 for c_i and c_{i+1}
        return bm25_candidates(chunks, doc, config.window_chunks, 1, idf) > 0
    # the chunk before c_i, because two spans of a document are alike
    return permitted(doc, 1) & ~permitted(doc, 2)


def contrast(retriever, chunks, doc, config, idf):
    """The contrastive loss, the mean over the chunks that have a positive of

        -log (exp s_q(positive) / Σ_j exp s_q(j)),   j: all other chunks of the micro-batch

    0 if no chunk has one. chunks (B, N, m), doc (B, N) -> ()"""
    is_positive = torch.block_diag(*positives(chunks, doc, config, idf))    # (B N, B N)
    query, key = retriever(chunks)                                          # (B, N, C)
    s_q = query.flatten(0, 1) @ key.flatten(0, 1).T / key.size(2) ** 0.5    # (B N, B N)
    is_itself = torch.eye(len(s_q), dtype=torch.bool, device=s_q.device)
    log_p = s_q.masked_fill(is_itself, -math.inf).log_softmax(1)
    log_p = log_p.masked_fill(~is_positive, 0)
    return -log_p.sum() / is_positive.sum().clamp(min=1)


def train_retriever(retriever, run, idf):
    """Trains a DenseRetriever on the first micro-batches of a run."""
    config = retriever.config
    device = retriever.embedding.weight.device
    idf = idf.float().to(device)            # mps has no fp64
    optimizer = torch.optim.AdamW(retriever.requires_grad_().parameters(), lr=1e-3)     # (ours)
    for number in run.progress_bar(range(config.reference_steps), 'training the retriever'):
        batch = run.batches[number]
        chunks = in_chunks(batch.tokens, config.chunk_size).to(device)
        doc = doc_of_chunks(batch.doc, config.chunk_size).to(device)
        optimizer.zero_grad()
        contrast(retriever, chunks, doc, config, idf).backward()
        optimizer.step()
    optimizer.zero_grad()                   # else the first step of the model moves it once more
    retriever.requires_grad_(False)
    retriever.is_trained.fill_(TRAINED[config.retriever])


def setup(model, run):
    """Trains the retriever, in the first process, before the training of the model; run: see
    train.py -> None, because no scores are added to batches"""
    config = model.config
    warn_if_too_short(config, run.corpus)
    # --init can have brought a retriever of the other kind
    if run.rank == 0 and model.retriever.is_trained != TRAINED[config.retriever]:
        print(f'first the retriever, {config.reference_steps} steps; then RPT')
        train_retriever(model.retriever, run, corpus_idf(run.corpus, config))
    if run.world > 1:
        for x in model.retriever.state_dict().values():
            torch.distributed.broadcast(x, 0)
