"""The tree as a whole: sizes, imports, and the text that the model files share."""
import ast, re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
BUDGET = {'trime.py': 680, 'rpt.py': 720, 'drt.py': 520, 'gca_kernel.py': 420, 'bm25.py': 150,
          'data.py': 550, 'train.py': 380, 'eval.py': 380}      # lines; in all 3700, tests 3000
MODELS = ('trime.py', 'rpt.py', 'drt.py')
PER_MODEL = {'SelfAttention', 'State', 'Block', 'EvalConfig', 'batches'}
PAPERS = {('MLP', 'drt.py')}                            # SwiGLU
IMPORTS = {'bm25.py': set(), 'gca_kernel.py': set(), 'data.py': {'bm25'}, 'trime.py': set(),
           'rpt.py': {'bm25'}, 'drt.py': {'gca_kernel'}, 'train.py': {'data'},
           'eval.py': {'data', 'train'}}
n_lines = lambda path: len(path.read_text().splitlines())


def definitions(name):
    """{name: text} of the top-level classes and functions of a file"""
    text = (ROOT / name).read_text()
    return {node.name: ast.get_source_segment(text, node) for node in ast.parse(text).body
            if isinstance(node, (ast.ClassDef, ast.FunctionDef))}


def test_the_budgets():
    sizes = {path.name: n_lines(path) for path in ROOT.glob('*.py')}
    assert sizes.keys() == BUDGET.keys()
    assert {name: n for name, n in sizes.items() if n > BUDGET[name]} == {}
    assert sum(sizes.values()) <= 3700
    assert sum(n_lines(path) for path in (ROOT / 'tests').glob('*.py')) <= 3000


@pytest.mark.parametrize('name', BUDGET)
def test_lines_and_functions_are_short(name):
    text = (ROOT / name).read_text()
    assert max(map(len, text.splitlines())) <= 100
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef):
            assert node.end_lineno - node.lineno < 110, node.name


@pytest.mark.parametrize('name', BUDGET)
def test_who_imports_whom(name):
    """A model file imports no other model file; train.py and eval.py import models by name only."""
    imported = set(re.findall(r'^\s*(?:import|from) (\w+)', (ROOT / name).read_text(), re.M))
    assert imported & {file[:-3] for file in BUDGET} <= IMPORTS[name]


def test_what_the_models_share_is_the_same_text():
    """A change made in one model file and forgotten in another shows up here."""
    texts = {name: definitions(name) for name in MODELS}
    assert {'RMSNorm', 'fp32', 'rotate'} <= set.intersection(*map(set, texts.values()))
    for name in set().union(*texts.values()) - PER_MODEL:
        files = [f for f in MODELS if name in texts[f] and (name, f) not in PAPERS]
        assert len({texts[f][name] for f in files}) <= 1, name
