"""The architecture, read off the imports: scripts import folders, and nothing points back."""

import ast
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

SUITE = Path(__file__).parent.parent
SCRIPTS = {
    "prepare_data", "data", "reward", "rollout", "loss", "train", "eval", "analyse", "tiny", "compare",
}  # fmt: skip
LEAVES = {"data", "loss"}
FOLDERS: dict[str, set[str]] = {
    "engine": set(),
    "grading": set(),
    "record": {"engine"},
    "stats": {"engine", "record"},
}
"""Each folder, with the other folders that it may import."""
MAX_LINES, MAX_TOP_LINES = 400, 3000


def modules_of(root: Path) -> dict[str, Path]:
    """Return the files of the suite by the names under which they are imported."""
    files = [*root.glob("*.py"), *(path for folder in FOLDERS for path in (root / folder).rglob("*.py"))]
    return {".".join(path.relative_to(root).with_suffix("").parts): path for path in sorted(files)}


def imports_of(path: Path, modules: dict[str, Path]) -> Iterator[str]:
    """Yield the suite's own modules that a file imports, wherever in it, also for type checking alone."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in modules)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}, line {node.lineno}: a relative import"
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
            yield from (name for name in names if name in modules)


def graph_of(root: Path) -> dict[str, set[str]]:
    """Return what each module imports of the suite."""
    modules = modules_of(root)
    return {name: set(imports_of(path, modules)) for name, path in modules.items()}


def arrows_back(root: Path) -> list[str]:
    """Return the imports that the architecture forbids, as `importer -> imported`."""
    found = []
    for importer, imported in graph_of(root).items():
        folder = importer.partition(".")[0]
        allowed = LEAVES | {folder} | FOLDERS[folder] if folder in FOLDERS else SCRIPTS | FOLDERS.keys()
        if importer in LEAVES:
            allowed = set[str]()
        found += [f"{importer} -> {name}" for name in sorted(imported) if name.partition(".")[0] not in allowed]
    return found


def cycle_of(graph: dict[str, set[str]]) -> list[str]:
    """Return the modules of a cycle, none where there is none."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return error.args[1]
    return []


def test_no_import_points_back():
    assert arrows_back(SUITE) == []


def test_modules_import_each_other_in_no_cycle():
    graph = graph_of(SUITE)
    assert {"train", "engine.policy", "record.run"} <= graph.keys()
    assert "engine.policy" in graph["train"]
    assert cycle_of(graph) == []


def test_an_arrow_back_and_a_cycle_are_found(tmp_path):
    files = {
        "data.py": "import loss",
        "loss.py": "",
        "train.py": "import record.run\nimport rollout",
        "rollout.py": "from data import Problem\ndef work():\n    import train",
        "engine/policy.py": "from data import Datum\nfrom engine.ranks import Ranks\nfrom record import run",
        "engine/ranks.py": "import torch",
        "record/run.py": "from engine.policy import Policy\nfrom stats import figures",
        "grading/answers.py": "from loss import LossConfig\nif True:\n    from reward import Grader",
        "stats/figures.py": "from grading.answers import decide\nfrom engine.ranks import Ranks",
        "reward.py": "from grading.answers import decide",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert arrows_back(tmp_path) == [
        "data -> loss",
        "engine.policy -> record.run",
        "grading.answers -> reward",
        "record.run -> stats.figures",
        "stats.figures -> grading.answers",
    ]
    assert set(cycle_of(graph_of(tmp_path))) in (
        {"train", "rollout"},
        {"engine.policy", "record.run"},
        {"reward", "grading.answers"},
    )


def test_no_file_outside_tests_and_bench_is_long():
    lengths = {name: len(path.read_text().splitlines()) for name, path in modules_of(SUITE).items()}
    assert {name: length for name, length in lengths.items() if length > MAX_LINES} == {}


def test_the_top_is_the_ten_scripts():
    paths = list(SUITE.glob("*.py"))
    assert {path.stem for path in paths} == SCRIPTS
    assert sum(len(path.read_text().splitlines()) for path in paths) <= MAX_TOP_LINES
