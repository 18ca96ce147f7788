"""Which kernels a process computes with, and what is said where there are none."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from native_checks import BUILT
from sametoken.kernels.cpu import structures
from sametoken.kernels.cpu import variant as native

# Apple M2 (has bfloat16) and M1 (has not), as `sysctl hw.optional` prints them.
ARM = "hw.optional.arm"
M2 = f"{ARM}.FEAT_DotProd: 1\n{ARM}.FEAT_BF16: 1\n{ARM}.FEAT_I8MM: 1\nhw.optional.AdvSIMD: 1\n"
M1 = f"{ARM}.FEAT_DotProd: 1\n{ARM}.FEAT_BF16: 0\nhw.optional.AdvSIMD: 1\nhw.optional.floatingpoint: 1\n"


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Lets a test say which machine this is and what its processor has."""
    monkeypatch.setenv(native.SWITCH, "auto")
    return monkeypatch


def pretend(patch: pytest.MonkeyPatch, system: str, name: str, *found: str) -> None:
    patch.setattr(native.platform, "system", lambda: system)
    patch.setattr(native.platform, "machine", lambda: name)
    patch.setattr(native, "processor_features", lambda: frozenset(found))


@pytest.mark.skipif(not BUILT, reason="no kernels were built for this machine")
def test_a_loaded_variant_needs_no_advice() -> None:
    found, status = native.choose()
    assert found is not None
    assert status == (found.name, status.features, None, None)
    assert set(status.features) >= native.VARIANTS[found.name]


def test_kernels_that_are_switched_off_say_so(machine: pytest.MonkeyPatch) -> None:
    machine.setenv(native.SWITCH, "off")
    found, status = native.choose()
    assert (found, status.variant) == (None, None)
    assert (status.reason, status.advice) == ("SAMETOKEN_NATIVE=off leaves them out", "unset SAMETOKEN_NATIVE")


@pytest.mark.parametrize("compiler", [None, "/usr/bin/g++"])
def test_kernels_that_were_not_built_name_the_command(machine: pytest.MonkeyPatch, compiler: str | None) -> None:
    machine.setattr(native.shutil, "which", lambda name: compiler)
    machine.setattr(native, "file_of", lambda variant: None)
    pretend(machine, "Linux", "aarch64", "asimd")
    status = native.choose()[1]
    assert status[:3] == (None, ("asimd",), "none were built when this package was installed")
    advice = status.advice or ""
    assert ("apt-get install g++), then run: pip install" in advice) == (compiler is None)
    assert "run: pip install --force-reinstall" in advice or "--no-binary" in advice


def test_kernels_of_other_sources_name_the_command(machine: pytest.MonkeyPatch, tmp_path: Path) -> None:
    other = tmp_path / "_kernels_neon.so"
    other.write_bytes(b"not a library")
    machine.setattr(native, "file_of", lambda variant: other)
    pretend(machine, "Darwin", "arm64", "asimd")
    machine.setattr(native.shutil, "which", lambda name: None)
    status = native.choose()[1]
    assert (status.reason or "").startswith("they cannot be loaded: ")
    assert "xcode-select --install" in (status.advice or "")


@pytest.mark.parametrize(
    ("system", "name", "found", "reason"),
    [
        ("Linux", "x86_64", ("fma",), "this processor lacks avx2"),
        ("Linux", "riscv64", (), "there are none for Linux on riscv64"),
        ("Windows", "AMD64", (), "there are none for Windows on AMD64"),
    ],
)
def test_a_machine_without_kernels_is_told_why(
    machine: pytest.MonkeyPatch, system: str, name: str, found: tuple[str, ...], reason: str
) -> None:
    pretend(machine, system, name, *found)
    assert native.choose()[1] == (None, found, reason, None)


@pytest.mark.parametrize(
    ("record", "argument"),
    [
        (None, "--no-cache-dir --no-binary sametoken sametoken"),
        ({"url": "file:///home/me/clone", "dir_info": {"editable": True}}, "-e /home/me/clone"),
        ({"url": "file:///home/me/clone", "dir_info": {}}, "--no-cache-dir /home/me/clone"),
        (
            {"url": "https://host/a.git", "vcs_info": {"vcs": "git", "commit_id": "1a2b"}},
            "--no-cache-dir git+https://host/a.git@1a2b",
        ),
    ],
)
def test_the_command_installs_from_where_the_package_came(
    monkeypatch: pytest.MonkeyPatch, record: dict[str, object] | None, argument: str
) -> None:
    text = None if record is None else json.dumps(record)
    monkeypatch.setattr(native, "distribution", lambda name: SimpleNamespace(read_text=lambda file: text))
    assert native.rebuild().endswith(f"pip install --force-reinstall --no-deps {argument}")


def test_features_are_read_as_each_system_tells_them() -> None:
    assert native.flags_of("processor\t: 0\nflags\t\t: fpu avx2 fma\n\nflags\t\t: fpu\n") >= {"avx2", "fma"}
    assert native.flags_of("") == set()
    # AWS Graviton 2 (Neoverse N1) and 3 (Neoverse V1): bits of AT_HWCAP and AT_HWCAP2 in Linux's hwcap.h
    assert native.hwcaps_of({16: 1 << 1 | 1 << 20, 26: 0}) == {"asimd", "asimddp"}
    assert native.hwcaps_of({16: 1 << 1 | 1 << 20, 26: 3 << 13}) == {"asimd", "asimddp", "bf16", "i8mm"}
    assert native.sysctl_of(M2) == {"asimd", "asimddp", "bf16", "i8mm"}
    assert native.sysctl_of(M1) == {"asimd", "asimddp"}
    assert native.sysctl_of("") == set()


def test_a_structure_refuses_a_field_that_it_does_not_have() -> None:
    with pytest.raises(TypeError, match="CSpan has no field node"):
        structures.struct_of(structures.CSpan, batch=1, node=2)
