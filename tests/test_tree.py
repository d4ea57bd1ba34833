"""The tree as a whole: how much there is to read and how densely, imports, shared text."""
import ast, io, re, tokenize
from pathlib import Path

from pytest import mark

ROOT = Path(__file__).parent.parent
BUDGET = {'trime.py': 8200, 'rpt.py': 10700, 'drt.py': 6800, 'gca_kernel.py': 4500, 'bm25.py': 1200,
          'data.py': 6100, 'train.py': 5000, 'eval.py': 6300}   # Python tokens; in all 48000
TESTS = [f'tests/{path.name}' for path in Path(__file__).parent.glob('*.py')]
MODELS = ('trime.py', 'rpt.py', 'drt.py')
PER_MODEL = {'SelfAttention', 'State', 'Block', 'EvalConfig', 'batches', 'setup', 'demo'}
PAPERS = {('MLP', 'drt.py')}                            # SwiGLU
IMPORTS = {'bm25.py': set(), 'gca_kernel.py': set(), 'data.py': {'bm25'}, 'train.py': {'data'},
           'trime.py': {'eval'}, 'rpt.py': {'eval', 'bm25'}, 'drt.py': {'eval', 'gca_kernel'},
           'eval.py': {'data', 'train'}}        # a model file imports eval for its demo alone
NOT_COUNTED = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT,
               tokenize.ENDMARKER}
LEAVES = (ast.Return, ast.Raise, ast.Break, ast.Continue, ast.Pass)


def read(name):
    return (ROOT / name).read_text()


def tokens_per_line(text):
    """{line: number of Python tokens that begin in it}; a string is one token. From Python 3.12 on
    an f-string has tokens within it, between FSTRING_START and FSTRING_END."""
    counts, depth = {}, 0
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        name = tokenize.tok_name[token.type]
        if depth == 0 and token.type not in NOT_COUNTED:
            line = token.start[0]
            counts[line] = counts.get(line, 0) + 1
        if name == 'FSTRING_START':
            depth += 1
        if name == 'FSTRING_END':
            depth -= 1
    return counts


def code_lines(text):
    """tokens_per_line without docstrings"""
    counts = tokens_per_line(text)
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)):
            if ast.get_docstring(node):
                del counts[node.body[0].lineno]
    return counts


def calls_in(node):
    return any(isinstance(x, ast.Call) for x in ast.walk(node))


def has_inner_body(node):
    """if x: y on one line; return, raise, break and continue may follow"""
    firsts = node.body[:1] + getattr(node, 'orelse', [])[:1]
    return any(x.lineno == node.lineno and not isinstance(x, LEAVES) for x in firsts)


def is_packed(node):
    """Has this node several ideas on one line?"""
    if isinstance(node, (ast.If, ast.For, ast.While, ast.With, ast.Try)):
        return has_inner_body(node)
    if isinstance(node, ast.Expr):
        return isinstance(node.value, (ast.BoolOp, ast.Tuple))
    if isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple):
        several = isinstance(node.targets[0], ast.Tuple)
        return several and sum(map(calls_in, node.value.elts)) > 1
    return isinstance(node, ast.NamedExpr)


def size(name):
    return sum(tokens_per_line(read(name)).values())


def test_there_is_little_to_read():
    files = {path.name for path in ROOT.glob('*.py')}
    assert files == BUDGET.keys()
    assert [name for name in files if size(name) > BUDGET[name]] == []
    assert sum(map(size, files)) <= 48000
    assert sum(map(size, TESTS)) <= 46000


@mark.parametrize('name', [*BUDGET, *TESTS])
def test_lines_are_not_dense(name):
    """A line of more than 20 tokens mostly has more than one idea."""
    text = read(name)
    counts = code_lines(text)
    assert max(map(len, text.splitlines())) <= 100
    share = sum(n > 20 for n in counts.values()) / len(counts)
    assert share <= (0.20 if name in TESTS else 0.12)
    assert [line for line, n in counts.items() if n > 36] == []


@mark.parametrize('name', [*BUDGET, *TESTS])
def test_a_statement_has_a_line_and_a_function_a_screen(name):
    text = read(name)
    lines = code_lines(text)
    nodes = list(ast.walk(ast.parse(text)))
    assert [node.lineno for node in nodes if is_packed(node)] == []
    for node in nodes:
        if isinstance(node, ast.FunctionDef):
            n = sum(node.lineno <= line <= node.end_lineno for line in lines)
            assert n <= (90 if node.name == 'train' else 60), node.name


@mark.parametrize('name', BUDGET)
def test_who_imports_whom(name):
    """A model file imports no other model file; train.py and eval.py import models by name only."""
    imported = set(re.findall(r'^\s*(?:import|from) (\w+)', read(name), re.M))
    assert imported & {file[:-3] for file in BUDGET} <= IMPORTS[name]


def definitions(name):
    """{name: text} of the top-level classes and functions of a file"""
    text = read(name)
    return {node.name: ast.get_source_segment(text, node) for node in ast.parse(text).body
            if isinstance(node, (ast.ClassDef, ast.FunctionDef))}


def test_what_the_models_share_is_the_same_text():
    """A change made in one model file and forgotten in another shows up here."""
    texts = {name: definitions(name) for name in MODELS}
    assert {'RMSNorm', 'fp32', 'rotate'} <= set.intersection(*map(set, texts.values()))
    for name in set().union(*texts.values()) - PER_MODEL:
        files = [f for f in MODELS if name in texts[f] and (name, f) not in PAPERS]
        assert len({texts[f][name] for f in files}) <= 1, name
