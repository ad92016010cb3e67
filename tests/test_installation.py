"""What `pip install` leaves behind: the kernels in every kind of installation, and none without a compiler."""

from __future__ import annotations

import ast
import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from collections.abc import Iterator
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

import pytest

from hf_accel.cli.serve import NEEDED, NEEDED_FOR_SOUNDS
from hf_accel.kernels.cpu.build import BuildError, find_compiler

ROOT = Path(__file__).parent.parent
KERNELS = Path("hf_accel", "kernels", "cpu")
REGISTRATION = "optimum/commands/register/register_hf_accel.py"  # where optimum-cli looks for commands
LIBRARY, REASON = KERNELS / "libhf_accel_cpu.so", KERNELS / "not_built.txt"


def has_compiler() -> bool:
    try:
        return bool(find_compiler())
    except BuildError:
        return False


needs_compiler = pytest.mark.skipif(not has_compiler(), reason="needs a C++ compiler")
needs_setuptools = pytest.mark.skipif(find_spec("setuptools") is None, reason="needs setuptools")


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("CXX", raising=False)
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """The sources alone, without what was built or installed from them."""
    target = tmp_path / "tree"
    shutil.copytree(ROOT / "hf_accel", target / "hf_accel", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE", "NOTICE"):
        shutil.copy(ROOT / name, target / name)
    (target / REASON).unlink(missing_ok=True)
    return target


def backend(tree: Path, hook: str, out: Path) -> Path:
    """A hook of PEP 517 or 660, as pip calls it, without a network; the file that it made."""
    out.mkdir()
    call = f"import setuptools.build_meta as b; b.{hook}({str(out)!r})"
    done = subprocess.run([sys.executable, "-c", call], cwd=tree, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return next(out.iterdir())


def commands_of_optimum(site: Path) -> list[str]:
    """Names of the commands that optimum-cli finds with `site` for a site-packages; without optimum, those we know."""
    if find_spec("optimum") is None or find_spec("optimum.gptq") is None:  # our own file makes a module of it
        return ["hf-accel"]
    code = """if True:
        import site, sys
        site.addsitedir(sys.argv[1])
        from optimum.commands.optimum_cli import load_optimum_namespace_cli_commands as load
        print(*(command.COMMAND.name for command, parent in load() if parent is None))
        """
    # -S: without the environment's own editable install of this package, whose finder would come first
    paths = os.pathsep.join(path for path in sys.path if path.endswith("site-packages"))
    done = subprocess.run(
        [sys.executable, "-S", "-c", code, str(site)], cwd=site, env={**os.environ, "PYTHONPATH": paths},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    return done.stdout.split()


def refusal(folder: Path) -> str:
    """What the plan would say about the kernels of the hf_accel in `folder`."""
    code = "from hf_accel.kernels.cpu import refusal; print(refusal())"
    environment = {k: v for k, v in os.environ.items() if k not in ("HF_ACCEL_LIBRARY", "HF_ACCEL_ISA")}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, env=environment | {"PYTHONPATH": str(folder)},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    return done.stdout.strip()


@pytest.mark.long
@needs_compiler
@pytest.mark.skipif(None in map(find_spec, ("auditwheel", "setuptools")), reason="needs auditwheel and setuptools")
def test_wheel(tree: Path, tmp_path: Path) -> None:
    """`make wheel` tags it for the Linux that it runs on; where it is installed, the fast path is there."""
    prefix = Path(sys.prefix)
    shutil.copy(ROOT / "Makefile", tree)
    ready = prefix / ".ready"  # this environment is, whether or not make has made it
    done = subprocess.run(
        ["make", "-o", str(ready), "wheel", f"VENV={prefix}"], cwd=tree, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    (wheel,) = (tree / "dist").iterdir()
    assert "-py3-none-manylinux_2_" in wheel.name
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    sources = {str(p.relative_to(tree)) for p in (tree / KERNELS / "src").rglob("*") if p.is_file()}
    assert sources
    assert {str(KERNELS / "build.py"), "hf_accel/py.typed"} | sources <= names
    assert [name for name in names if ".so" in name] == [str(LIBRARY)]  # no OpenMP of its own
    assert str(REASON) not in names
    assert not [n for n in names if n.startswith(("tests", "benchmarks")) or n == "setup.py"]
    assert any(n.endswith("licenses/LICENSE") for n in names)
    environment = tmp_path / "environment"
    venv.create(environment)
    (site,) = environment.glob("lib/python*/site-packages")
    (site / "dependencies.pth").write_text(str(Path(find_spec("torch").origin).parents[1]))  # type: ignore[union-attr, arg-type]
    pip = [sys.executable, "-m", "pip", "--python", str(environment), "install", "--quiet"]
    subprocess.run([*pip, "--no-deps", "--no-index", str(wheel)], check=True)
    answer = subprocess.run(
        [environment / "bin" / "python", "-c", FIRST_PART, str(ROOT / "examples" / "stdlib-tiny")],
        cwd=tmp_path, env={"PATH": str(tmp_path), "HF_HUB_OFFLINE": "1"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert answer.returncode == 0, answer.stderr
    package, backends = answer.stdout.splitlines()
    assert Path(package).is_relative_to(environment)
    assert backends == "{'cpu'}"


FIRST_PART = """
import sys
import hf_accel
from transformers import AutoModelForCausalLM, AutoTokenizer
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
model = hf_accel.patch(AutoModelForCausalLM.from_pretrained(sys.argv[1]))
model.generate(**tokenizer("import os", return_tensors="pt"), max_new_tokens=4, do_sample=False)
print(hf_accel.__file__)
print({layer.choice.backend.name for layer in model.modules() if isinstance(layer, hf_accel.linear.QuantLinear)})
"""


@pytest.mark.long
@needs_setuptools
def test_wheel_without_a_compiler(tree: Path, tmp_path: Path, no_compiler: None) -> None:
    """Nor with the library of an earlier build, which may be of other sources."""
    for folder in (tree, tree / "build" / "lib"):
        (folder / LIBRARY).parent.mkdir(parents=True, exist_ok=True)
        (folder / LIBRARY).write_bytes(b"of other sources")
    wheel = backend(tree, "build_wheel", tmp_path / "dist")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
        assert [name for name in archive.namelist() if "optimum" in name] == [REGISTRATION], "no file of optimum's own"
    assert commands_of_optimum(tmp_path / "site") == ["hf-accel"]
    assert not (tmp_path / "site" / LIBRARY).exists()
    assert refusal(tmp_path / "site") == "cpu kernels: not built (no compiler)"


@pytest.mark.long
@needs_setuptools
@pytest.mark.parametrize(
    ("host", "tag"),
    [
        ("linux-aarch64", "linux_aarch64"),
        ("macosx-11.0-arm64", "macosx_11_0_arm64"),
        ("macosx-11.0-universal2", f"macosx_11_0_{platform.machine()}"),
    ],
)
def test_tag_of_a_wheel(
    tree: Path, tmp_path: Path, no_compiler: None, monkeypatch: pytest.MonkeyPatch, host: str, tag: str
) -> None:
    """It names the platform that Python is for, and of two kinds of processor the one that the library is for."""
    monkeypatch.setenv("_PYTHON_HOST_PLATFORM", host)
    assert backend(tree, "build_wheel", tmp_path / "dist").name.endswith(f"-py3-none-{tag}.whl")


@pytest.fixture(params=["with", "without"])
def compiler(request: pytest.FixtureRequest) -> Iterator[bool]:
    if request.param == "without":
        request.getfixturevalue("no_compiler")
    elif not has_compiler():
        pytest.skip("needs a C++ compiler")
    yield request.param == "with"


@pytest.mark.long
@needs_setuptools
def test_editable(tree: Path, tmp_path: Path, compiler: bool) -> None:
    """The library lies beside its sources."""
    wheel = backend(tree, "build_editable", tmp_path / "dist")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    assert commands_of_optimum(tmp_path / "site") == ["hf-accel"]
    assert (tree / LIBRARY).exists() == compiler
    assert (tree / REASON).exists() == (not compiler)
    assert refusal(tree) == ("None" if compiler else "cpu kernels: not built (no compiler)")


@pytest.mark.long
@needs_setuptools
def test_source_distribution(tree: Path, tmp_path: Path) -> None:
    """It holds what a wheel is built from, and nothing that was built."""
    (tree / LIBRARY).write_bytes(b"built here")
    archive = backend(tree, "build_sdist", tmp_path / "dist")
    with tarfile.open(archive) as tar:
        names = {name.partition("/")[2] for name in tar.getnames()}
    sources = {str(p.relative_to(tree)) for p in (tree / KERNELS / "src").rglob("*") if p.is_file()}
    assert {"setup.py", "pyproject.toml", "LICENSE", "NOTICE", str(KERNELS / "build.py")} | sources <= names
    assert str(LIBRARY) not in names


# -- extras ------------------------------------------------------------------------------------------------

MODULES = {"PIL": "pillow"}  # names of packages that are not those of their modules
# What an extra of transformers brings through its own packages, which need them to work at all.
BROUGHT = {"starlette": "fastapi", "pydantic": "fastapi", "pydantic_core": "fastapi"}


def requirements(lines: list[str]) -> set[str]:
    """The names of packages, with those of transformers' own extra in place of its name."""
    found: set[str] = set()
    for line in lines:
        name, extra = re.match(r"([\w.-]+)(?:\[(\w+)\])?", line).groups()  # type: ignore[union-attr]
        if extra is not None:
            asked = [each for each in metadata.requires(name) or () if f"extra == '{extra}'" in each.replace('"', "'")]
            found |= requirements(asked)
        found.add(name.lower().replace("-", "_"))
    return found


def imported(folder: Path) -> set[str]:
    """The first parts of the modules that the files of a folder import by their whole names."""
    found: set[str] = set()
    for file in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                found |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level:
                found.add(str(node.module).partition(".")[0])
    return found - set(sys.stdlib_module_names) - {"hf_accel"}


def test_the_serve_extra_has_what_the_server_imports() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    there = requirements([*project["dependencies"], *project["optional-dependencies"]["serve"]])
    names = {MODULES.get(name, BROUGHT.get(name, name)) for name in imported(ROOT / "hf_accel" / "serving")}
    assert {"pillow", "prometheus_client", "fastapi"} <= names
    assert names - {"tokenizers"} <= there, names - there  # which transformers needs
    assert "python_multipart" in there  # by which starlette reads forms
    assert {MODULES.get(name, name) for name in (*NEEDED, *NEEDED_FOR_SOUNDS)} <= there
