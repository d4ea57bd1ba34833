"""The tree as a whole: its files, who imports whom, shared text, one idea a statement.

    $ python tests/test_tree.py         the size and density of each file, for information
"""
import ast, io, re, tokenize
from pathlib import Path

from pytest import mark

ROOT = Path(__file__).parent.parent
MODELS = ('trime.py', 'rpt.py', 'drt.py')
SOURCES = [*MODELS, 'gca_kernel.py', 'bm25.py', 'data.py', 'train.py', 'eval.py']
COMPARED = [f'compared/{path.name}' for path in sorted((ROOT / 'compared').glob('*.py'))]
TESTS = [f'tests/{path.name}' for path in sorted((ROOT / 'tests').glob('*.py'))]

# definitions of the same name that differ: each paper's own
PER_MODEL = {'SelfAttention', 'Block', 'Retrieved', 'State', 'EvalConfig', 'batches', 'setup',
             'init_weights', 'prepare_eval', 'demo'}
PAPERS = {('MLP', 'drt.py')}                            # SwiGLU
IMPORTS = {'bm25.py': set(), 'gca_kernel.py': set(), 'data.py': {'bm25'}, 'train.py': {'data'},
           'trime.py': set(), 'rpt.py': {'bm25'}, 'drt.py': {'gca_kernel'},
           'eval.py': {'data', 'train', 'compared.cache'}}
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


def test_the_files():
    """Those of README, and no others"""
    assert {path.name for path in ROOT.glob('*.py')} == {*SOURCES}
    assert len(COMPARED) >= 6
    readme = read('README.md')
    for name in [*SOURCES, *COMPARED]:
        assert Path(name).name in readme, name


def test_what_a_class_changes_is_there():
    """Each row of README's table "For a class" names a file, a definition and what is changed."""
    rows = re.findall(r'^\| (\w+\.py), `(?:\w+\.)?(\w+)` \| `(.*?)` to `', read('README.md'), re.M)
    assert len(rows) >= 7
    for file, name, old in rows:
        text = read(file)
        nodes = [node for node in ast.walk(ast.parse(text)) if getattr(node, 'name', '') == name]
        assert any(old in ast.get_source_segment(text, node) for node in nodes), (file, name, old)

    # and a test that sees the change
    tests = re.findall(r'\| `(test_\w+\.py) -k (\w+)` \|$', read('README.md'), re.M)
    assert len(tests) == len(rows)
    for file, word in tests:
        assert re.search(rf'^def test_\w*{word}', read(f'tests/{file}'), re.M), (file, word)


@mark.parametrize('name', [*SOURCES, *COMPARED, *TESTS])
def test_a_line_has_one_idea_and_a_function_one_job(name):
    text = read(name)
    lines = code_lines(text)
    assert max(map(len, text.splitlines())) <= 100
    assert [line for line, n in lines.items() if n > 36] == []
    nodes = list(ast.walk(ast.parse(text)))
    assert [node.lineno for node in nodes if is_packed(node)] == []
    for node in nodes:
        if isinstance(node, ast.FunctionDef):
            n = sum(node.lineno <= line <= node.end_lineno for line in lines)
            assert n <= 60, node.name


def imported_by(name):
    """The modules of the tree that a file imports"""
    imported = set()
    for node in ast.walk(ast.parse(read(name))):
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
        if isinstance(node, ast.ImportFrom):
            imported.add(node.module)
    of_tree = {file[:-3].replace('/', '.') for file in [*SOURCES, *COMPARED]}
    return imported & of_tree


@mark.parametrize('name', SOURCES)
def test_who_imports_whom(name):
    """A model file imports no other model file, also not in its demo; train.py and eval.py import
    models by name only."""
    assert imported_by(name) <= IMPORTS[name]


@mark.parametrize('name', COMPARED)
def test_a_compared_system_starts_from_one_model(name):
    imported = imported_by(name)
    wanted = 0 if name == 'compared/cache.py' else 1            # it is for all models
    assert len(imported) == wanted and imported <= {file[:-3] for file in MODELS}


def definitions(name):
    """{name: its lines} of the top-level classes and functions of a file"""
    text = read(name)
    lines = text.splitlines()
    return {node.name: '\n'.join(lines[node.lineno - 1:node.end_lineno])
            for node in ast.parse(text).body if isinstance(node, (ast.ClassDef, ast.FunctionDef))}


def test_what_the_models_share_is_the_same_text():
    """A change made in one model file and forgotten in another shows up here."""
    texts = {name: definitions(name) for name in MODELS}
    assert {'RMSNorm', 'fp32', 'rotate', 'Traced'} <= set.intersection(*map(set, texts.values()))
    for name in set().union(*texts.values()) - PER_MODEL:
        files = [f for f in MODELS if name in texts[f] and (name, f) not in PAPERS]
        assert len({texts[f][name] for f in files}) <= 1, name


@mark.parametrize('name', ['README.md', 'results.md'])
def test_rows_of_a_table_have_all_cells(name):
    """With a cell too few below the header, the whole table is shown as text."""
    for table in re.findall(r'(?:^\|.*\n)+', read(name), re.M):
        rows = re.sub('`[^`\n]*`', '', table).splitlines()
        assert len({row.count('|') for row in rows}) == 1, rows[0]


@mark.parametrize('name', MODELS)
def test_what_a_header_names_exists(name):
    """The table "Where the paper is in this file": its last column has classes and functions."""
    text = read(name)
    _, header, body = text.split('"""', 2)
    table = header.split('Where the paper is')[1].split('\n\n')[0]
    names = [re.split(r'\s{2,}', line.strip())[-1] for line in table.splitlines()[1:]]
    names = [name for name in names if '--' not in name]        # flags
    for part in ', '.join(names).split(', '):
        if re.fullmatch(r'[A-Za-z_.]+', part) and '.py' not in part:
            defined = part.split('.')[-1]
            assert re.search(rf'(class|def) {defined}\b|^{defined} =', body, re.M), part


def print_sizes():
    """Prints the lines and tokens of each file, and the share of code lines above 20 tokens."""
    for name in [*SOURCES, *COMPARED, *TESTS]:
        text = read(name)
        lines = code_lines(text)
        share = sum(n > 20 for n in lines.values()) / max(1, len(lines))
        tokens = sum(tokens_per_line(text).values())
        print(f'{name:30} {text.count(chr(10)):5} lines {tokens:6} tokens, {share:4.0%} of code '
              'lines have more than 20')


if __name__ == '__main__':
    print_sizes()
