"""What a release consists of: files, tags, metadata and licences, and that the wheel works outside of the repository.

`SAMETOKEN_DIST=DIRECTORY` tests distributions that are there already; otherwise they are built here, without the index.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
from email.message import Message
from email.parser import HeaderParser
from functools import cache
from pathlib import Path
from zipfile import ZipFile

import pytest
import setuptools

import sametoken
from sametoken.kernels.cpu.variant import VARIANTS

ROOT = Path(__file__).parents[2]
LICENCES = ("LICENSE", "examples/embedded/LICENSES.md")
X86 = sys.platform == "linux" and os.uname().machine == "x86_64"
BARE = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="releases are not built on Windows")


def run(*command: str | Path, cwd: Path, **environment: str) -> str:
    done = subprocess.run(list(map(str, command)), cwd=cwd, env=BARE | environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def pip(*arguments: str | Path, cwd: Path, **environment: str) -> str:
    return run(sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments, cwd=cwd, **environment)


@pytest.fixture(scope="session")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of the distributions, built once for all processes of a run."""
    if given := os.environ.get("SAMETOKEN_DIST"):
        return Path(given).resolve()
    for name in ("build", "twine", "auditwheel"):
        pytest.importorskip(name, reason="needs the extra dist")
    parent = tmp_path_factory.getbasetemp()
    shared = parent / "dist"
    if "PYTEST_XDIST_TESTRUNUID" in os.environ:
        shared = parent.parent / f"dist-{os.environ['PYTEST_XDIST_TESTRUNUID']}"
    with shared.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not shared.exists():
            run(sys.executable, ROOT / "scripts" / "build_dist.py", shared, "--no-isolation", cwd=shared.parent)
    return shared


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """What a wheel is built from, somewhere else: builds leave files beside their sources."""
    place, leave = tmp_path / "tree", shutil.ignore_patterns("*.so", "*.egg-info", "__pycache__")
    for name in ("src", "examples"):
        shutil.copytree(ROOT / name, place / name, ignore=leave)
    for name in ("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, place)
    return place


def built(tree: Path, **environment: str) -> Path:
    """The wheel that pip makes of a tree, as it does when it installs the tree."""
    out = tree.parent / "wheel"
    pip("wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", out, tree, cwd=tree.parent, **environment)
    (wheel,) = out.iterdir()
    return wheel


@pytest.mark.skipif(not X86 or shutil.which("g++") is None, reason="needs g++ on Linux on x86-64")
def test_variants_that_are_compiled_side_by_side_do_not_mix(tree: Path) -> None:
    """They have one source, so their object files have one name."""
    source = tree / "src/sametoken/kernels/cpu/decoder.cpp"
    source.write_text(
        "#ifdef __AVX512F__\n#define WIDTH 512\n#else\n#define WIDTH 256\n#endif\n"
        'extern "C" int width() { return WIDTH; }'
    )
    lib, temp = tree / "lib", tree / "temp"
    options = ("--build-lib", lib, "--build-temp", temp)
    run(sys.executable, "setup.py", "build_ext", *options, cwd=tree, SAMETOKEN_BUILD_KERNELS="required")
    assert len(list(temp.rglob("*.o"))) == 2
    widths = {file.stem: ctypes.CDLL(str(file)).width() for file in lib.rglob("*.so")}
    assert widths == {"_kernels_avx2": 256, "_kernels_avx512": 512}


def the(dist: Path, pattern: str) -> Path:
    (found,) = dist.glob(pattern)
    return found


def pure(dist: Path) -> Path:
    return the(dist, "*-py3-none-any.whl")


@cache
def contents(wheel: Path) -> dict[str, bytes]:
    with ZipFile(wheel) as packed:
        return {name: packed.read(name) for name in packed.namelist() if not name.endswith("/")}


def module_files(wheel: Path) -> dict[str, bytes]:
    return {name: data for name, data in contents(wheel).items() if ".dist-info/" not in name}


def dist_info(wheel: Path, name: str) -> bytes:
    (found,) = (data for path, data in contents(wheel).items() if path.endswith(f".dist-info/{name}"))
    return found


def metadata(wheel: Path) -> Message:
    return HeaderParser().parsestr(dist_info(wheel, "METADATA").decode())


@cache
def in_sdist(dist: Path) -> dict[str, bytes]:
    with tarfile.open(the(dist, "*.tar.gz")) as packed:
        files = {member.name.partition("/")[2]: packed.extractfile(member) for member in packed if member.isfile()}
        return {name: file.read() for name, file in files.items() if file is not None}


def newest(symbols: str, library: str) -> tuple[int, ...]:
    found = re.findall(rf"{library}_([0-9.]+)", symbols)
    return max(tuple(map(int, version.split("."))) for version in found)


@pytest.mark.skipif(not X86, reason="other systems have other kernels")
def test_a_wheel_with_kernels_is_tagged_by_what_its_files_need(dist: Path) -> None:
    wheel = the(dist, "*-py3-none-manylinux_*_x86_64.whl")
    promised = re.search(r"manylinux_(\d+)_(\d+)_x86_64\.whl", wheel.name)
    assert promised
    assert b"Root-Is-Purelib: false" in dist_info(wheel, "WHEEL")
    kernels = {Path(name).name: data for name, data in contents(wheel).items() if name.endswith(".so")}
    assert sorted(kernels) == ["_kernels_avx2.so", "_kernels_avx512.so"]
    for name, data in kernels.items():
        file = dist.parent / f"{os.getpid()}-{name}"
        file.write_bytes(data)
        symbols, needed = (run("readelf", option, "-W", file, cwd=dist) for option in ("-V", "-d"))
        file.unlink()
        assert newest(symbols, "GLIBC") <= tuple(map(int, promised.groups()))
        assert newest(symbols, "GLIBCXX") <= (3, 4, 22)  # GCC 6's: what torch itself asks for is newer
        libraries = set(re.findall(r"Shared library: \[([a-z+_-]+)", needed))
        assert libraries <= {"libstdc++", "libm", "libgcc_s", "libc", "ld-linux-x"}


def test_the_wheel_for_every_machine_differs_by_the_kernels_alone(dist: Path) -> None:
    everywhere = module_files(pure(dist))
    assert b"Root-Is-Purelib: true" in dist_info(pure(dist), "WHEEL")
    assert not [name for name in everywhere if name.endswith((".so", ".h", ".cpp"))]
    for wheel in set(dist.glob("*.whl")) - {pure(dist)}:
        here = module_files(wheel)
        assert here.keys() - everywhere.keys() <= {f"sametoken/kernels/cpu/_kernels_{name}.so" for name in VARIANTS}
        assert {name: here[name] for name in everywhere} == everywhere


def test_the_sdist_gives_the_wheel_that_the_tree_gives(dist: Path, tree: Path) -> None:
    wheel = built(tree, SAMETOKEN_BUILD_KERNELS="off")
    assert module_files(wheel) == module_files(pure(dist))
    assert dist_info(wheel, "METADATA") == dist_info(pure(dist), "METADATA")


def test_the_sdist_holds_what_its_tests_and_documents_need(dist: Path) -> None:
    packed = in_sdist(dist)
    for folder in ("src", "tests", "docs", "scripts", "benchmarks", "conformance", "deploy"):
        for file in (ROOT / folder).rglob("*"):
            if file.suffix in (".py", ".md", ".h", ".cpp", ".yml"):
                assert str(file.relative_to(ROOT)) in packed
    assert {"Makefile", "CHANGELOG.md", "constraints.txt", "constraints-lowest.txt"} <= packed.keys()
    assert not [name for name in packed if name.endswith((".so", ".pyc"))]


def test_templates_of_deployments_are_inside(dist: Path) -> None:
    names = {
        f"sametoken/deploy/templates/{file.name}" for file in (ROOT / "src/sametoken/deploy/templates").glob("*.*")
    }
    assert len(names) > 10
    for wheel in dist.glob("*.whl"):
        assert names <= contents(wheel).keys()


def test_licences_and_credits_are_inside(dist: Path) -> None:
    for name in LICENCES:
        expected = (ROOT / name).read_bytes()
        assert in_sdist(dist)[name] == expected
        for wheel in dist.glob("*.whl"):
            assert dist_info(wheel, f"licenses/{name}") == expected


def test_the_tokenizer_is_packed_once(dist: Path) -> None:
    for names in (*map(contents, dist.glob("*.whl")), in_sdist(dist)):
        found = [name for name in names if name.endswith("/tokenizer.json")]
        assert [name.removeprefix("src/") for name in found] == ["sametoken/embedded/target/tokenizer.json"]


def test_metadata_say_what_an_index_shows(dist: Path) -> None:
    for wheel in dist.glob("*.whl"):
        said = metadata(wheel)
        assert said["Version"] == sametoken.__version__
        assert wheel.name.startswith(f"sametoken-{sametoken.__version__}-")
        assert said["License-Expression"] == "Apache-2.0"
        assert said["Author"]
        assert said["Keywords"]
        assert "Programming Language :: Python :: 3.13" in said.get_all("Classifier", [])
        urls = [line.split(", ")[1] for line in said.get_all("Project-URL", [])]
        assert len(urls) >= 4
        assert len({url.split("/")[3] for url in urls}) == 1  # all below one address


def test_links_of_the_description_lead_somewhere_from_anywhere(dist: Path) -> None:
    said = metadata(pure(dist))
    repository = next(line.split(", ")[1] for line in said.get_all("Project-URL", []) if "Repository" in line)
    description = said.get_payload()
    assert isinstance(description, str)
    links = re.findall(r"(!?)\[[^\]]*\]\(([^)]+)\)", description)
    assert ("!", f"{repository}/raw/HEAD/docs/playground.png") in links
    for _, link in links:
        assert link.startswith(("https://", "#")), link
        if link.startswith(repository):
            path = link.removeprefix(repository).split("/", 3)[3].partition("#")[0]
            assert (ROOT / path).exists(), link


def test_without_a_compiler_the_package_installs_without_kernels(tree: Path) -> None:
    assert built(tree, CC="false", CXX="false").name.endswith("-py3-none-any.whl")


@pytest.mark.skipif(not X86, reason="other systems may have no kernels")
def test_a_release_without_a_compiler_fails(tree: Path) -> None:
    with pytest.raises(AssertionError, match="Failed building wheel"):
        built(tree, CC="false", CXX="false", SAMETOKEN_BUILD_KERNELS="required")


def test_an_unknown_switch_of_the_build_is_refused(tree: Path) -> None:
    with pytest.raises(AssertionError, match="SAMETOKEN_BUILD_KERNELS='none': expected auto, off or required"):
        built(tree, SAMETOKEN_BUILD_KERNELS="none")


@pytest.fixture
def elsewhere(tmp_path: Path) -> Path:
    """An environment of its own; `lend` shows it this one's packages."""
    place = tmp_path / "venv"
    run(sys.executable, "-m", "venv", "--without-pip", place, cwd=tmp_path)
    return place


def lend(place: Path) -> None:
    (packages,) = place.glob("lib/python*/site-packages")
    # .pth files of a folder that a .pth file names are not read, so an editable installation stays behind.
    (packages / "others.pth").write_text("\n".join(path for path in sys.path if path.endswith("site-packages")))


def test_the_wheel_speaks_outside_of_the_repository(dist: Path, elsewhere: Path, tmp_path: Path) -> None:
    pip("--python", elsewhere / "bin" / "python", "install", "--quiet", "--no-index", "--no-deps", "--find-links", dist,
        "sametoken", cwd=tmp_path)  # fmt: skip
    lend(elsewhere)
    program = elsewhere / "bin" / "sametoken"
    assert run(program, "--version", cwd=tmp_path) == f"sametoken {sametoken.__version__}\n"
    place = run(elsewhere / "bin" / "python", "-c", "import sametoken; print(sametoken.__file__)", cwd=tmp_path)
    assert Path(place.strip()).is_relative_to(elsewhere)
    ask = ("--prompt", "Hi! A latte, please.", "--chat", "--temperature", "0", "--max-tokens", "8", "--json")
    said = json.loads(run(program, "generate", *ask, cwd=tmp_path))
    assert said["text"].strip()
    assert 1 <= said["speculation"]["target_forwards"] <= len(said["token_ids"]) <= 8


def test_an_editable_installation_reads_the_tree(tree: Path, elsewhere: Path, tmp_path: Path) -> None:
    python = elsewhere / "bin" / "python"
    (packages,) = elsewhere.glob("lib/python*/site-packages")
    for pattern in ("setuptools", "setuptools-*.dist-info", "_distutils_hack"):
        (found,) = Path(setuptools.__file__).parents[1].glob(pattern)
        (packages / found.name).symlink_to(found)
    pip("--python", python, "install", "--quiet", "--no-deps", "--no-build-isolation", "-e", tree, cwd=tmp_path,
        SAMETOKEN_BUILD_KERNELS="off")  # fmt: skip
    lend(elsewhere)
    place = run(python, "-c", "import sametoken; print(sametoken.__file__)", cwd=tmp_path)
    assert Path(place.strip()) == tree / "src" / "sametoken" / "__init__.py"


def test_a_release_is_refused_under_another_tag_or_a_placeholder_address(dist: Path) -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "scripts" / "release_check.py", "v9.9", dist], capture_output=True, text=True
    )
    assert done.returncode == 1
    assert f"is version {sametoken.__version__}, the tag is v9.9" in done.stderr
    assert "CHANGELOG.md has no section '## 9.9'" in done.stderr
    assert ("names a placeholder" in done.stderr) == (".invalid/" in str(metadata(pure(dist))))
