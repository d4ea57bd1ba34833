"""
RPT with a retriever that is trained first, then fixed: DPR and Contriever, which RPT and DRT
compare with.

    Vladimir Karpukhin et al., "Dense Passage Retrieval for Open-Domain Question Answering", EMNLP
    2020, arXiv:2004.04906;  RPT, App. C
    Gautier Izacard et al., "Unsupervised Dense Information Retrieval with Contrastive Learning",
    TMLR 2022, arXiv:2112.09118;  RPT_contriever of DRT, §4.1

It starts from rpt.py. The retriever has its own embeddings, sees the tokens of a chunk alone, and
learns by contrast: chunk i is to score a positive above all other chunks of a micro-batch.

Where this differs from the papers
    Both     a Retriever of rpt.py on new embeddings, trained on the same documents (papers: BERT);
             scores are divided by sqrt(C)
    DPR      positives are BM25's first chunk (paper: an answer's passage); one encoder for queries
             and passages, with W_Q and W_K on it (paper: two); no hard negatives
    Contriever  the positive is the chunk before (paper: another span of the document); no queue of
             negatives, no momentum encoder; W_Q and W_K differ (paper: one encoder)
    Padding is a chunk like the others among the negatives.

Letters as in rpt.py

    $ python train.py --model dense --n-inner 640
    $ python train.py --model dense --retriever contriever --n-inner 640
"""
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
    retriever: Literal['dpr', 'contriever'] = 'dpr'     # what its positives are
    reference_steps: int = 300                          # steps of its training


PRESETS = rpt.PRESETS


class DenseRetriever(nn.Module):
    """Queries and keys of chunks from their tokens alone"""
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.n_embd)
        self.retriever = Retriever(config)
        self.register_buffer('is_trained', torch.zeros(()))         # 1: see setup

    def forward(self, chunks):
        """chunks (B, N, m) of tokens -> queries and keys, 2 x (B, N, C)"""
        _, query, key = self.retriever(self.embedding(chunks))
        return query, key


class Dense(RPT):
    """RPT, whose retriever reads no states of the decoder"""
    def __init__(self, config):
        super().__init__(config)
        seed = torch.randint(2 ** 48, (), device='cpu').item()
        self.retriever = DenseRetriever(config)
        init_weights(self.retriever, seed)
        self.retriever.requires_grad_(False)

    def queries_and_keys(self, chunk_states, chunk_tokens):
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
    """The contrastive loss: -log softmax_j(s_q(j)) at the positive, over all other chunks j of the
    micro-batch; the mean over the chunks that have a positive, 0 if none has

    chunks (B, N, m), doc (B, N) -> ()"""
    is_positive = torch.block_diag(*positives(chunks, doc, config, idf))    # (B N, B N)
    query, key = retriever(chunks)                                          # (B, N, C)
    s_q = query.flatten(0, 1) @ key.flatten(0, 1).T / key.size(2) ** 0.5    # (B N, B N)
    log_p = s_q.fill_diagonal_(-1e9).log_softmax(1)
    return -(log_p * is_positive).sum() / is_positive.sum().clamp(min=1)


def train_retriever(retriever, run, idf):
    """Trains a DenseRetriever on the first micro-batches of a run."""
    config = retriever.config
    device = retriever.embedding.weight.device
    optimizer = torch.optim.AdamW(retriever.requires_grad_().parameters(), lr=1e-3)
    for number in run.progress_bar(range(config.reference_steps), 'training the retriever'):
        batch = run.batches[number]
        chunks = in_chunks(batch.tokens, config.chunk_size).to(device)
        doc = doc_of_chunks(batch.doc, config.chunk_size).to(device)
        optimizer.zero_grad()
        contrast(retriever, chunks, doc, config, idf.to(device)).backward()
        optimizer.step()
    retriever.requires_grad_(False)
    retriever.is_trained.fill_(1)


def setup(model, run):
    """Trains the retriever, in the first process, before the training of the model; run: see
    train.py -> None, because no scores are added to batches"""
    config = model.config
    warn_if_too_short(config, run.corpus)
    if run.rank == 0 and not model.retriever.is_trained:
        print(f'first the retriever, {config.reference_steps} steps; then RPT')
        train_retriever(model.retriever, run, corpus_idf(run.corpus, config))
    if run.world > 1:
        for x in model.retriever.state_dict().values():
            torch.distributed.broadcast(x, 0)
