"""What several test files use: small texts, definitions by loops, batches, a short training."""
import json, math
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

import train

# flags of runs that take seconds
COMMON = ('--data texts --tokenizer bytes --n-layer 2 --n-head 2 --n-embd 16 --micro-batch 2 '
          '--device cpu --dtype fp32 --max-steps 6 --eval-every 2 ').split()
# two micro-batches a step, with dropout, Gumbel noise and masks where a model has them
FLAGS = {'trime': '--block-size 16 --tokens-per-step 64 --dropout 0.1',
         'drt': '--block-size 35 --tokens-per-step 140 --window 8 --chunk-size 8 --n-neighbors 2 '
                '--encoder tokens --gumbel',
         'rpt': '--block-size 70 --tokens-per-step 280 --window 16 --chunk-size 4 --dropout 0.1 '
                '--n-neighbors 2 --n-candidates 3 --score-every 1'}


def flags(model='trime', more=''):
    return [*COMMON, '--model', model, *FLAGS[model].split(), *more.split()]


# --------------------------------------------------------------------------------------------------
# files and messages
def one_line(function, *args, **kwargs):
    """The message of the error that a call ends with, one line"""
    with pytest.raises(SystemExit) as error:
        function(*args, **kwargs)
    message = str(error.value)
    assert '\n' not in message
    return message


def write(folder, **files):
    """Writes files, from names such as train__a_txt for train/a.txt. -> folder"""
    for name, text in files.items():
        path = folder / name.replace('__', '/').replace('_', '.')
        path.parent.mkdir(exist_ok=True, parents=True)
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return folder


def jsonl(texts):
    return ''.join(json.dumps(dict(text=text)) + '\n' for text in texts)


def write_splits(folder, train, val):
    return write(folder, train_jsonl=jsonl(train), val_jsonl=jsonl(val))


# --------------------------------------------------------------------------------------------------
# definitions
def close(a, b, atol=1e-9):
    """Asserts that two tensors are equal, in fp64 up to what a few layers round."""
    torch.testing.assert_close(a, b, rtol=0, atol=atol)


def formula(docs, query, k1=1.2, b=0.75, idf=None):
    """BM25's score of each document, term by term from the equations in the header of bm25.py"""
    docs = [Counter(doc) for doc in docs]
    N = len(docs)
    mean = sum(doc.total() for doc in docs) / N
    scores = [0] * N
    for t in query:
        df = sum(t in doc for doc in docs)
        idf_t = math.log(1 + (N - df + 0.5) / (df + 0.5))
        if idf is not None:
            idf_t = idf[t] if t < len(idf) else 0
        for i, doc in enumerate(docs):
            norm = k1 * (1 - b + b * doc.total() / mean)
            scores[i] += idf_t * doc[t] / (doc[t] + norm)
    return scores


def ranking(scores, k=None, limit=None):
    """Ids of the k largest scores above 0 (None: of all), the lower id first among equals"""
    positive = [i for i in range(len(scores))[:limit] if scores[i] > 1e-12]
    return sorted(positive, key=lambda i: (-round(scores[i], 9), i))[:k]


def rope(x, positions):
    """x (n, H, D): the complex number x_2d + i x_2d+1 is rotated by p 10000^(-2d/D)."""
    theta = 10000 ** -(torch.arange(0, x.size(2), 2) / x.size(2))
    angle = torch.tensor(positions)[:, None, None] * theta
    z = torch.view_as_complex(x.unflatten(2, (-1, 2)).contiguous())
    return torch.view_as_real(z * torch.exp(1j * angle)).flatten(2)


# --------------------------------------------------------------------------------------------------
# models
def random_tokens(*shape, seed=0, vocab=23):
    return torch.randint(vocab, shape, generator=torch.Generator().manual_seed(seed))


def batch_of(tokens, doc=None, seed=0, **more):
    """A batch in which each token of a row but the last has a target, of one document"""
    targets = F.pad(tokens[:, 1:], (0, 1), value=-1)
    if doc is None:
        doc = torch.zeros_like(tokens)
    return SimpleNamespace(tokens=tokens, targets=targets, doc=doc, seed=seed, **more)


def learn(model, steps, make_batch):
    """Training with the defaults of train.py: optimizers, rate and clipping"""
    config = train.TrainConfig(max_steps=steps)
    optimizers = train.optimizers_of(model.train(), config)
    for step in range(steps):
        loss, _ = model(make_batch(step), step / steps)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.grad_clip)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group['lr'] = train.learning_rate(step, config)
            optimizer.step()
        model.zero_grad()
    return model.eval()


def log_p(model, tokens):
    """log P of the tokens (n,) of a document but the first"""
    log_probs = model.log_probs(tokens[None, :-1])[0]
    return log_probs.gather(1, tokens[1:, None])[:, 0]


def assert_causal(model, tokens, exact=False):
    """Changing token t changes no log P before it, and it changes the one after it. exact: bit for
    bit; then each text is read alone, because rows of a batch can be rounded differently."""
    atol = 0 if exact else 1e-9
    T = tokens.size(1)
    texts = tokens.repeat(T + 1, 1, 1)                          # (T + 1, B, T), the last unchanged
    for t in range(T):
        texts[t, :, t] = (tokens[:, t] + 1) % 23
    if exact:
        log_probs = torch.stack([model.log_probs(text) for text in texts])
    else:
        log_probs = model.log_probs(texts.flatten(0, 1)).unflatten(0, (T + 1, -1))
    differences = (log_probs[:T] - log_probs[T:]).abs().amax((1, 3))
    for t, difference in enumerate(differences):
        early = (difference[:t] > atol).nonzero().flatten().tolist()
        assert early == [], f'token {t} changes what is predicted at the positions {early}'
        assert difference[t] > atol, f'token {t} does not change the next prediction'


def assert_ties(model, part, others):
    """In fp32, in pieces and in one pass, the same of the copies of a text (1, n) is retrieved: the
    same follows. After each copy comes another text, one of others (20, t)."""
    text = torch.cat([part.expand(20, -1), others], 1).flatten()[None]
    full = model.log_probs(text)
    for size in (7, 21, 50):
        close(streamed(model, text, size)[0], full, 1e-3)


def streamed(model, tokens, sizes):
    """log P (B, T, V) of tokens in pieces of this size or these sizes, and the last state"""
    state, parts = None, []
    for piece in tokens.split(sizes, 1):
        log_probs, state = model.stream(piece, state)
        parts.append(log_probs)
    return torch.cat(parts, 1), state
