"""What the source never does: run what it reads, load what can carry code, build SQL from values, trust a model's own code."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import kept

REPOSITORY = Path(__file__).resolve().parents[2]
ROOTS = ("service/rollbook", "chaos", "migrations", ".ci")

CARRIERS = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "marshal", "shelve", "joblib", "jsonpickle", "yaml"}
"""Modules whose files or messages can carry code."""
RUNNERS = {"eval", "exec", "compile", "execfile", "__import__"}
"""Built-ins that run text."""
SHELLS = {("os", "system"), ("os", "popen"), ("subprocess", "getoutput"), ("subprocess", "getstatusoutput")}
SQL_TAKERS = {"exec_driver_sql", "text", "execute", "executemany", "executescript", "DDL", "_execute"}
SQL_WORDS = ("SELECT ", "INSERT ", "UPDATE ", "DELETE ", "CREATE ", "ALTER ", "DROP ", "PRAGMA ", "ATTACH ", "COPY ", "SET ")

RUNS_TEXT = {
    ("service/rollbook/sandbox/job.py", "run"): "the job of a sandbox: this is where model-written code runs, contained",
    ("service/rollbook/sandbox/zygote_main.py", "main"): "imports of the module names its parent gives it, before any job",
    ("service/rollbook/tasks/verdicts/judge_side.py", "serve"): "the judge's sandbox runs the task's own tests",
}
"""(file, function) that runs text, and why it may."""

BUILDS_SQL = {
    ("service/rollbook/ledger/dialects.py", "_quick_check"): "a PRAGMA takes no parameter; names from the database's own list",
    ("service/rollbook/ledger/dialects.py", "insert_rows"): "names of the schema's columns; every value is a parameter",
    ("service/rollbook/ledger/dialects.py", "rows_by_slot"): "names of the schema's columns; every value is a parameter",
    ("service/rollbook/ledger/dialects.py", "delete_by_slot"): "the name of a table of the schema; every value is a parameter",
    ("service/rollbook/ledger/dialects.py", "connect"): "a PRAGMA takes no parameter; the constants of this file",
    ("service/rollbook/ledger/dialects.py", "start"): "BEGIN or BEGIN IMMEDIATE, a constant of this file",
    ("service/rollbook/ledger/dialects.py", "condition"): "statements of this function; no value at all",
    ("service/rollbook/ledger/partitions.py", "ensure"): "DDL takes no parameter; names of the schema's tables and two integers",
    ("service/rollbook/ledger/partitions.py", "drop"): "DDL takes no parameter; names of the schema's tables and two integers",
    ("service/rollbook/ledger/backup.py", "_tidy_postgresql"): "VACUUM takes no parameter; names from the database's own list",
    ("service/rollbook/ledger/backup.py", "_tidy_sqlite"): "a PRAGMA takes no parameter; the constants of this file",
    ("chaos/postgres_server.py", "commit_waits_for"): "ALTER SYSTEM takes no parameter; names of the drill's own servers",
    ("chaos/long_run.py", "_rows"): "the names of the drill's own list of tables; no value at all",
    ("service/rollbook/ledger/migrate.py", "_upgrade"): "the number of a lock, a constant of this file",
    ("migrations/versions/0002_store_what_a_fork_decided.py", "upgrade"): "DDL takes no parameter; constants of this file",
    ("migrations/versions/0003_tell_failures_apart.py", "_rebuild_sample"): "names of the schema's columns; no value at all",
    ("chaos/oracle_rows.py", "read_ledger"): "the names of the oracle's own list of tables; the run is a parameter",
    ("chaos/drills/report.py", "timeline"): "no SQL: the labels of a plot",
    ("chaos/postgres_server.py", "create"): "DDL takes no parameter; the drill's own name of a database",
    ("chaos/postgres_server.py", "drop"): "DDL takes no parameter; the drill's own name of a database",
}
"""(file, function) that puts a name into SQL, and where the name comes from. Values are parameters everywhere."""


@dataclass(frozen=True)
class Finding:
    rule: str
    file: str
    function: str
    line: int


class Reader(ast.NodeVisitor):
    """Walks one file and collects what must not stand there."""

    def __init__(self, file: str) -> None:
        self.file = file
        self.findings: list[Finding] = []
        self._functions: list[str] = []

    def found(self, rule: str, node: ast.AST) -> None:
        function = self._functions[-1] if self._functions else ""
        self.findings.append(Finding(rule, self.file, function, getattr(node, "lineno", 0)))

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        self._functions.append(node.name)
        self.generic_visit(node)
        self._functions.pop()

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_Import(self, node: ast.Import) -> None:
        if any(alias.name.split(".")[0] in CARRIERS for alias in node.names):
            self.found("a module whose files can carry code", node)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        if (node.module or "").split(".")[0] in CARRIERS:
            self.found("a module whose files can carry code", node)

    def visit_Call(self, node: ast.Call) -> None:
        owner, name = _name_of(node.func)
        given = {k.arg: k.value for k in node.keywords if k.arg}
        if not owner and name in RUNNERS and isinstance(node.func, ast.Name):
            self.found("text is run", node)
        if (owner, name) in SHELLS or ("shell" in given and not _is(given["shell"], False)):
            self.found("a shell reads a command", node)
        if (owner, name) == ("torch", "load") and not _is(given.get("weights_only"), True):
            self.found("torch.load without weights_only=True", node)
        if "allow_pickle" in given and not _is(given["allow_pickle"], False):
            self.found("numpy reads pickles", node)
        if "trust_remote_code" in given and not _is(given["trust_remote_code"], False):
            self.found("a model's own code is trusted", node)
        if name == "from_pretrained" and not _is(given.get("trust_remote_code"), False):
            self.found("from_pretrained without trust_remote_code=False", node)
        if name in SQL_TAKERS and node.args and _is_built(node.args[0], strict=name in ("exec_driver_sql", "text")):
            self.found("SQL is built", node)
        self.generic_visit(node)

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        first = node.values[0] if node.values else None
        if self.file.startswith(("service/rollbook/ledger", "migrations")) and isinstance(first, ast.Constant):
            if str(first.value).lstrip().startswith(SQL_WORDS):
                self.found("SQL is built", node)
        self.generic_visit(node)

    def visit_Dict(self, node: ast.Dict) -> None:
        for key, value in zip(node.keys, node.values, strict=True):
            if isinstance(key, ast.Constant) and key.value == "trust_remote_code" and not _is(value, False):
                self.found("a model's own code is trusted", node)
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, str) and "ALLOW_INSECURE_SERIALIZATION" in node.value:
            self.found("an engine is told to take pickles", node)


def _name_of(function: ast.expr) -> tuple[str, str]:
    if isinstance(function, ast.Name):
        return "", function.id
    if isinstance(function, ast.Attribute):
        return (function.value.id if isinstance(function.value, ast.Name) else "?"), function.attr
    return "?", ""


def _is(node: ast.expr | None, value: bool) -> bool:
    return isinstance(node, ast.Constant) and node.value is value


def _is_built(node: ast.expr, strict: bool) -> bool:
    """Whether a statement is put together; ``strict``: whatever is no literal is, for the takers of plain text."""
    if isinstance(node, ast.Constant):
        return False
    if isinstance(node, ast.JoinedStr | ast.BinOp):
        return True
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in ("format", "join", "replace"):
        return True
    return strict


def findings_in(text: str, file: str) -> list[Finding]:
    reader = Reader(file)
    reader.visit(ast.parse(text))
    return reader.findings


def sources() -> Iterator[tuple[str, str]]:
    for root in ROOTS:
        for path in sorted((REPOSITORY / root).rglob("*.py")):
            yield str(path.relative_to(REPOSITORY)), path.read_text()


@pytest.fixture(scope="module")
def findings() -> list[Finding]:
    read = list(sources())
    assert len(read) > 150, "the whole source is looked at"
    return [finding for file, text in read for finding in findings_in(text, file)]


def test_no_text_is_run_outside_of_the_sandbox(findings: list[Finding]) -> None:
    found = {(f.file, f.function) for f in findings if f.rule == "text is run"}
    assert found == set(RUNS_TEXT), "each place that runs text stands in RUNS_TEXT with its reason, and no other"


def test_sql_is_bound_and_names_in_it_come_from_the_schema(findings: list[Finding]) -> None:
    found = {(f.file, f.function) for f in findings if f.rule == "SQL is built"}
    unknown = found - set(BUILDS_SQL)
    assert not unknown, f"bind values as parameters, or say in BUILDS_SQL where the name comes from: {unknown}"
    assert set(BUILDS_SQL) <= found, "an entry that allows nothing any more"


def test_nothing_that_can_carry_code_is_loaded_and_nothing_is_given_to_a_shell(findings: list[Finding]) -> None:
    others = [f for f in findings if f.rule not in ("text is run", "SQL is built")]
    assert not others, others


@pytest.mark.parametrize(("text", "rule"), [
    ("import pickle", "carry code"), ("from pickle import loads", "carry code"), ("import dill as d", "carry code"),
    ("import yaml", "carry code"), ("def f():\n    from cloudpickle import loads", "carry code"),
    ("import marshal, os", "carry code"),
    ("eval(x)", "text is run"), ("exec(compile(x, '', 'exec'))", "text is run"), ("torch.load(p)", "weights_only"),
    ("torch.load(p, weights_only=False)", "weights_only"), ("torch.load(p, weights_only=flag)", "weights_only"),
    ("np.load(p, allow_pickle=True)", "pickles"), ("A.from_pretrained(p)", "from_pretrained"),
    ("A.from_pretrained(p, trust_remote_code=True)", "own code"), ("LLM(trust_remote_code=flag)", "own code"),
    ("s = {'trust_remote_code': True}", "own code"), ("subprocess.run(c, shell=True)", "shell"), ("os.system(c)", "shell"),
    ("subprocess.Popen(c, shell=flag)", "shell"), ("os.environ['VLLM_ALLOW_INSECURE_SERIALIZATION'] = '1'", "take pickles"),
    ("c.exec_driver_sql(f'SELECT {x}')", "SQL"), ("c.exec_driver_sql(query)", "SQL"), ("c.execute('SELECT %s' % x)", "SQL"),
    ("c.execute('SELECT ' + x)", "SQL"), ("c.execute('SELECT {}'.format(x))", "SQL"), ("sa.text(f'a = {x}')", "SQL"),
    ("sa.text(x)", "SQL"), ("q = f'DELETE FROM t WHERE x = {x}'", "SQL"), ("op.execute(f'ALTER TABLE {t}')", "SQL"),
])  # fmt: skip
def test_the_check_sees_each_of_them(text: str, rule: str) -> None:
    assert any(rule in f.rule for f in findings_in(text, "service/rollbook/ledger/planted.py"))


@pytest.mark.parametrize("text", [
    "re.compile(x)", "model.eval()", "torch.load(p, weights_only=True)", "A.from_pretrained(p, trust_remote_code=False)",
    "subprocess.run([a], shell=False)", "c.execute(sa.select(t))", "c.execute('SELECT 1 WHERE a = %s', (x,))", "sa.text('a')",
    "c.exec_driver_sql('SELECT 1')", "f'Select a file: {x}'", "np.load(p, allow_pickle=False)", "json.loads(x)",
])  # fmt: skip
def test_the_check_leaves_what_is_right_alone(text: str) -> None:
    assert not findings_in(text, "service/rollbook/ledger/planted.py")


@pytest.mark.parametrize("value", [
    {(1, 0): ((3, 4), b"\0\xff", b"", 0.1 + 0.2, None, "é", True)}, {"planned": {}, "chain": {1: "a"}}, [(), [], {}],
    {"bytes": "a tag that is a key"}, -0.0, 2**70, float("inf"),
])  # fmt: skip
def test_what_a_drill_keeps_in_a_file_is_read_back_equal(value: object) -> None:
    again = kept.loads(kept.dumps(value))
    assert again == value and type(again) is type(value) and repr(again) == repr(value)


def test_a_drills_file_that_was_changed_gives_no_code_to_run() -> None:
    for text in ('{"object": "os.system"}', '{"bytes": "00", "tuple": []}', '{"bytes": 1}', "cos\nsystem\n(S'true'\ntR."):
        with pytest.raises(ValueError):
            kept.loads(text)
    with pytest.raises(TypeError, match="set cannot be kept"):
        kept.dumps({1, 2})
