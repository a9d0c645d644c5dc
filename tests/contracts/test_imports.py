"""Imports go one way, importing has no side effect, and every distribution that is imported is declared."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import packages_distributions, requires
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "weightformer"

# A room imports from rooms of its own level or a lower one, wherever in the file the import stands.
LEVELS = {"ops": 0, "layers": 1, "models": 2, "config": 2, "training": 3}
LEVELS |= dict.fromkeys(("tasks", "streaming", "analysis", "bench", "export"), 4)
LEVELS |= {"demo": 5, "cli": 6}

# What `import weightformer` and its model code may rely on; everything else is imported where it is used.
CORE_ROOMS = ("ops", "layers", "models")


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """Line and full name of everything that a file imports, at its top or inside functions."""
    package = ".".join(path.relative_to(PACKAGE.parent).parent.parts)
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = package.rsplit(".", node.level - 1)[0] if node.level else ""
            module = ".".join(filter(None, (parents, node.module)))
            yield from ((node.lineno, f"{module}.{alias.name}") for alias in node.names)


def room(parts: tuple[str, ...]) -> str:
    return parts[0].removesuffix(".py")


def sources() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def test_imports_go_one_way() -> None:
    files = [(path, room(path.relative_to(PACKAGE).parts)) for path in sources()]
    files = [(path, here) for path, here in files if not here.startswith("__")]
    assert {here for _, here in files} <= LEVELS.keys(), "a new room needs its level here"
    upward = [
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for path, here in files
        for line, name in imports(path)
        if name.startswith("weightformer.") and LEVELS.get(name.split(".")[1], -1) > LEVELS[here]
    ]
    assert not upward, "\n".join(upward)


def declared() -> tuple[set[str], set[str]]:
    """Names of the distributions that the core requires, and of those that the extras add."""
    core, extras = set(), set()
    for requirement in requires("weightformer") or []:
        name = re.split(r"[^\w.-]", requirement)[0].lower()
        (extras if "extra ==" in requirement else core).add(name)
    return core, extras - {"weightformer"}


def test_every_import_is_a_declared_dependency() -> None:
    core, extras = declared()
    distributions = packages_distributions()
    undeclared = []
    for path in sources():
        allowed = core if room(path.relative_to(PACKAGE).parts) in CORE_ROOMS else core | extras
        if path.stem in ("triton", "triton_support"):  # the GPU kernels, loaded on demand; torch brings triton for CUDA
            allowed = allowed | {"triton"}
        if path.stem in ("denoiser", "dig"):  # imported when asked for
            allowed = allowed | {"diffusers"}
        for line, name in imports(path):
            top = name.split(".")[0]
            if top in sys.stdlib_module_names or top == "weightformer":
                continue
            if allowed.isdisjoint(d.lower() for d in distributions.get(top, [top])):
                undeclared.append(f"{path.relative_to(ROOT)}:{line} imports {top}")
    assert not undeclared, "\n".join(undeclared)


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=300)


SIDE_EFFECTS = """
import logging, os, random, sys, warnings
import numpy, timm, torch, torchvision

def state():
    return {
        "environment": dict(os.environ),
        "warning filters": list(warnings.filters),
        "log handlers": list(logging.getLogger().handlers),
        "threads": (torch.get_num_threads(), torch.get_num_interop_threads()),
        "default dtype": torch.get_default_dtype(),
        "gradients": torch.is_grad_enabled(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "matmul precision": torch.get_float32_matmul_precision(),
        "tf32": (torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32),
        "cudnn": (torch.backends.cudnn.enabled, torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic),
        "random state": (random.getstate(), torch.get_rng_state().tolist(), str(numpy.random.get_state())),
        "excepthook": sys.excepthook,
    }

warnings.simplefilter("error")
before, models = state(), set(timm.list_models())
import weightformer
after = state()
assert before == after, [key for key in before if before[key] != after[key]]
new = set(timm.list_models()) - models
assert new and all(name.startswith(("weightformer_", "pvt_v1_", "convnext_isotropic_")) for name in new), new
heavy = {"lightning", "pytorch_lightning", "matplotlib", "sklearn", "diffusers", "transformers", "tensorboard",
         "torchmetrics", "onnx", "onnxruntime", "jsonargparse", "pandas", "ray", "faster_coco_eval", "hypothesis"}
assert not heavy & set(sys.modules), heavy & set(sys.modules)
"""


def test_importing_registers_the_models_and_does_nothing_else() -> None:
    result = run(SIDE_EFFECTS)
    assert result.returncode == 0, result.stderr
    assert (result.stdout, result.stderr) == ("", "")


# Every distribution that only an extra brings is absent, as after a plain `pip install weightformer`.
WITHOUT_EXTRAS = """
import sys

class Without:
    def __init__(self, finder):
        self.finder = finder

    def __getattr__(self, name):
        return getattr(self.finder, name)

    def find_spec(self, name, path=None, target=None):
        return None if name.split(".")[0] in {absent!r} else self.finder.find_spec(name, path, target)

sys.meta_path[:] = map(Without, sys.meta_path)
"""


def optional_modules() -> set[str]:
    """Top-level modules that no core requirement brings, directly or through another."""
    core, extras = declared()
    only_extra = extras - core
    return {
        module
        for module, owners in packages_distributions().items()
        if only_extra & {owner.lower() for owner in owners}
    }


@pytest.fixture(scope="module")
def without_extras() -> str:
    absent = optional_modules()
    assert {"lightning", "sklearn", "pytest"} <= absent
    return WITHOUT_EXTRAS.format(absent=absent)


def test_what_needs_no_extra_works_without(without_extras: str) -> None:
    code = """
import timm, torch, weightformer
from weightformer.cli import main
model = timm.create_model("weightformer_micro").eval()
print(*model(torch.rand(1, 3, 33, 41)).shape)
print(main(["--help"]), main(["info", "weightformer_micro"]))
"""
    result = run(without_extras + code)
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    assert (lines[0], lines[-1]) == ("1 10", "0 0")


def test_a_missing_extra_says_what_to_install(without_extras: str) -> None:
    code = """
from weightformer.cli import main
for argv in (["train", "--config", "digits"], ["eval", "x.ckpt"], ["predict", "x.ckpt", "x.png"]):
    print(main(argv))
"""
    result = run(without_extras + code)
    assert result.stdout.split() == ["2", "2", "2"]
    for line in result.stderr.splitlines():
        assert re.fullmatch(r"error: .*pip install ['\"]weightformer\[train\]['\"]", line)
