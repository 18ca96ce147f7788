"""Two processes against one: the same tokens in float32, and in bfloat16 the same with drafts and without."""

from __future__ import annotations

import os
import pickle
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from cli_checks import Pair
from engine_checks import PLAIN, make_llm, prompts, said, save_pair
from sametoken import LLM, SamplingParams
from sametoken.control.choice import RequestedDraft
from sametoken.errors import ConfigError, EngineError
from sametoken.heads.draft_model.drafts import DraftModelDrafter
from sametoken.options.sampling import RequestSpeculation
from sametoken.parallel.follow import join
from sametoken.parallel.host import own_cores, shares_cores
from sametoken.parallel.lead import lead
from sametoken.parallel.messages import Changes, Forward, read
from sametoken.parallel.place import RankPlace, place_of
from sametoken.parallel.shared import MEMORY_SWITCH

GREEDY = SamplingParams(max_tokens=24, temperature=0)
SAMPLED = SamplingParams(max_tokens=24, temperature=0.9, top_p=0.95, seed=11, presence_penalty=0.3, logprobs=2)
RANKS = {"tensor_parallel_size": 2, "tensor_parallel_check": True}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    return save_pair("llama-3", tmp_path_factory.mktemp("pair"))


@pytest.fixture
def two(models: tuple[str, str]) -> Iterator[LLM]:
    """A tree of drafts in bfloat16, in two processes."""
    llm = make_llm(*models, dtype="bfloat16", tree_top_k=3, max_total_draft_tokens=7, **RANKS)
    yield llm
    assert llm.ranks is not None
    llm.ranks.close()


def test_two_ranks_give_the_tokens_of_one(models: tuple[str, str]) -> None:
    one, both = make_llm(*models), make_llm(*models, **RANKS)
    assert both.ranks is not None
    assert len(both.ranks.processes) == 1
    asked = prompts(6)
    for params in (GREEDY, replace(SAMPLED, logprobs=None)):
        expected = [c.token_ids for c in one.generate(asked, params)]
        assert [c.token_ids for c in both.generate(asked, params)] == expected
    process = both.ranks.processes[1]
    both.ranks.close()
    assert process.returncode == 0


def test_drafts_change_no_bit_of_two_ranks(two: LLM) -> None:
    """Log-probabilities are compared as they are, so that a single bit would show."""
    asked = prompts(6)
    for params in (GREEDY, SAMPLED):
        drafted = two.generate(asked, params)
        assert max(c.speculation.acceptance_length for c in drafted) > 1.2
        assert [said(c) for c in two.generate(asked, replace(params, speculative=PLAIN))] == [said(c) for c in drafted]
        alone = [two.generate([prompt], params)[0].token_ids for prompt in asked[:2]]
        assert alone == [c.token_ids for c in drafted[:2]]


def test_united_drafts_change_no_bit_of_two_ranks(two: LLM) -> None:
    """Trees of a model and guesses of the host in one: it travels as any other."""
    policy, asked = two.engine.drafting.policy, prompts(4)
    policy.choose = lambda rows, beside=0: [  # type: ignore[method-assign]
        RequestedDraft(row.limit, row.methods, "" if row.limit else "end", joined=True) for row in rows
    ]
    params = replace(SAMPLED, speculative=RequestSpeculation(method="auto", steps=True))
    drafted = two.generate(asked, params)
    steps = [step for each in drafted for step in each.steps or ()]
    assert any(len({name for sayers in step.drafters for name in sayers}) > 1 for step in steps)
    assert [said(c) for c in two.generate(asked, replace(params, speculative=PLAIN))] == [said(c) for c in drafted]


@pytest.mark.parametrize(
    ("memory", "options"),
    [
        ("on", {"max_draft_len": 4}),
        ("on", {"max_draft_len": 4, "draft_window": 5}),
        pytest.param("off", {"max_draft_len": 4}, marks=pytest.mark.thorough),
        pytest.param("on", {"tree_top_k": 3, "max_total_draft_tokens": 7}, marks=pytest.mark.thorough),
    ],
)
def test_a_draft_model_of_two_ranks_changes_no_bit(
    models: tuple[str, str], memory: str, options: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chains that are guessed in one call, and trees of a forward a level; the check compares what all ranks guess."""
    monkeypatch.setenv(MEMORY_SWITCH, memory)
    llm = make_llm(*models, dtype="bfloat16", draft_tensor_parallel_size=2, **options, **RANKS)
    assert llm.ranks is not None
    asked = prompts(6)
    for params in (GREEDY, SAMPLED, replace(SAMPLED, top_k=9, min_p=0.01, presence_penalty=0.0)):
        drafted = llm.generate(asked, params)
        assert max(c.speculation.acceptance_length for c in drafted) > 1.2
        assert [said(c) for c in llm.generate(asked, replace(params, speculative=PLAIN))] == [said(c) for c in drafted]
    drafter = llm.engine.drafters["draft_target"]
    assert isinstance(drafter, DraftModelDrafter)
    assert (drafter.decoder.config.num_kv_heads, llm.config.num_kv_heads) == (1, 1)  # a half each
    llm.ranks.close()


def test_prefixes_are_reused_and_rows_preempted_with_two_ranks(models: tuple[str, str]) -> None:
    llm = make_llm(*models, cache={"max_tokens": 256}, max_batch_size=4, draft_tensor_parallel_size=2, **RANKS)
    reference = make_llm(models[0])
    asked = [[*range(3, 60), n] for n in range(6)]
    params = replace(GREEDY, max_tokens=30)
    expected = [c.token_ids for c in reference.generate(asked, params)]
    assert [c.token_ids for c in llm.generate(asked, params)] == expected
    again = llm.generate(asked, params)
    assert [c.token_ids for c in again] == expected
    assert any(c.cached_tokens for c in again)
    assert llm.engine.load.preemptions > 0


def test_a_rank_that_computes_something_else_is_named_with_its_forward(two: LLM) -> None:
    assert two.ranks is not None
    two.generate([[5, 6, 7]], replace(GREEDY, max_tokens=4))
    with torch.no_grad():  # on rank 0 alone
        two.engine.runner.decoder.embed.weight[7] += 0.25
    with pytest.raises(EngineError, match=r"rank 1 computed other hidden states than rank 0 in forward \d+"):
        two.generate([[5, 6, 7]], replace(GREEDY, max_tokens=4))


def test_heads_that_cannot_be_divided_are_refused_before_anything_is_started(models: tuple[str, str]) -> None:
    with pytest.raises(ConfigError, match=r"tensor_parallel_size 3: .*num_key_value_heads 2.*; use one of 1, 2$"):
        make_llm(models[0], tensor_parallel_size=3)


@pytest.mark.parametrize(
    ("draft", "ranks", "words"),
    [
        ("embedded", 3, "draft_tensor_parallel_size 3: expected 1, or tensor_parallel_size, which is 2"),
        (None, 2, "draft_tensor_parallel_size 2: there is no draft model to divide"),
        ("embedded-eagle3", 2, "draft_tensor_parallel_size 2: .* is a head, .* only a draft model can be divided"),
    ],
)
def test_drafts_that_cannot_be_divided_are_refused(draft: str | None, ranks: int, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        LLM("embedded", draft, {"draft_tensor_parallel_size": ranks}, tensor_parallel_size=2)


# Launchers.


def launched(pair: Pair, ranks: Sequence[dict[str, str]], *options: str) -> list[subprocess.CompletedProcess[str]]:
    """The same command as each of some ranks; variables of other launchers are left out."""
    arguments = [
        "generate",
        str(pair.target),
        "--prompt",
        "abcabc",
        "--max-tokens",
        "8",
        "--temperature",
        "0",
        *options,
    ]
    known = {
        k: v for k, v in os.environ.items() if not k.startswith(("OMPI", "PMI", "SLURM", "RANK", "WORLD", "MASTER"))
    }
    running = [
        subprocess.Popen(
            [sys.executable, "-m", "sametoken.cli", *arguments], env=known | own, text=True, stdout=-1, stderr=-1
        )
        for own in ranks
    ]
    outputs = [each.communicate(timeout=90) for each in running]
    return [subprocess.CompletedProcess([], p.returncode, *out) for p, out in zip(running, outputs, strict=True)]


def open_mpi(rank: int, size: int = 2) -> dict[str, str]:
    names = {"RANK": rank, "SIZE": size, "LOCAL_SIZE": size}
    return {f"OMPI_COMM_WORLD_{name}": str(value) for name, value in names.items()} | {
        "PMIX_NAMESPACE": str(os.getpid())
    }


def test_ranks_that_mpirun_starts_find_each_other(pair: Pair) -> None:
    first, second = launched(pair, [open_mpi(0), open_mpi(1)], "--tp_size", "2")
    (alone,) = launched(pair, [{}])
    assert (first.returncode, second.returncode) == (0, 0), first.stderr + second.stderr
    assert (first.stdout, second.stdout) == (alone.stdout, "")


@pytest.mark.thorough
def test_ranks_that_load_other_files_end_with_one_error(pair: Pair, tmp_path: Path) -> None:
    other = tmp_path / "other"
    save_pair("llama-3", other)
    here = launched_apart(pair, other / "target")
    assert {each.returncode for each in here} == {1, 2}
    assert "rank 1 has other files of" in here[0].stderr


@pytest.mark.thorough
def test_a_checkpoint_that_all_ranks_refuse_is_one_error(pair: Pair, tmp_path: Path) -> None:
    """mpirun shows what all ranks print; torchrun on two hosts has a terminal on each."""
    shutil.copytree(pair.target, tmp_path / "model")
    weights = tmp_path / "model" / "model.safetensors"
    kept = load_file(weights)
    missing = next(name for name in kept if "down_proj" in name)
    save_file({name: tensor for name, tensor in kept.items() if name != missing}, weights, {"format": "pt"})
    damaged = pair._replace(target=str(tmp_path / "model"))
    first, second = launched(damaged, [open_mpi(0), open_mpi(1)], "--tp_size", "2")
    assert (first.returncode, second.returncode) == (2, 1)
    assert first.stderr.count("error:") == 1
    assert f"1 missing: {missing}" in first.stderr
    assert second.stderr == ""
    torchrun = RankPlace(1, 2, 1, "10.0.0.1", 7, "torchrun")
    assert (torchrun.own_terminal, torchrun._replace(here=2).own_terminal) == (True, False)


def launched_apart(pair: Pair, other: Path) -> list[subprocess.CompletedProcess[str]]:
    """Two ranks in directories of their own, whose `model` differs."""
    places = []
    for rank, model in enumerate((Path(pair.target), other)):
        place = other.parent / f"host{rank}"
        place.mkdir()
        (place / "model").symlink_to(model)
        places.append(place)
    command = [sys.executable, "-m", "sametoken.cli", "generate", "model", "--prompt", "a", "--tp_size", "2"]
    running = [
        subprocess.Popen(command, cwd=place, env=os.environ | open_mpi(rank), text=True, stdout=-1, stderr=-1)
        for rank, place in enumerate(places)
    ]
    outputs = [each.communicate(timeout=90) for each in running]
    return [subprocess.CompletedProcess([], p.returncode, *out) for p, out in zip(running, outputs, strict=True)]


def test_places_of_each_launcher() -> None:
    assert place_of({}, 2) == RankPlace(0, 2, 2, "127.0.0.1", 0)
    torchrun = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "7"}
    assert place_of(torchrun, 2) == RankPlace(1, 2, 1, "10.0.0.1", 7, "torchrun")
    assert place_of(torchrun | {"TORCHELASTIC_USE_AGENT_STORE": "True"}, 2).shared_store
    mpirun = place_of(open_mpi(1), 2)
    assert (mpirun.rank, mpirun.here, mpirun.host, mpirun.launcher) == (1, 2, "127.0.0.1", "mpirun")
    assert mpirun.port == place_of(open_mpi(0), 2).port
    assert place_of({"SLURM_PROCID": "0", "SLURM_NTASKS": "1"}, 2).launcher == ""
    slurm = {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2", "SLURM_LAUNCH_NODE_IPADDR": "10.1.1.1"}
    slurm["SLURM_STEP_TASKS_PER_NODE"] = "1(x2)"
    assert place_of(slurm, 2)[:4] == (1, 2, 1, "10.1.1.1")
    mpich = place_of({"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALNRANKS": "2"}, 2)
    assert (mpich.rank, mpich.here, mpich.host, mpich.launcher) == (1, 2, "127.0.0.1", "mpirun")
    again = place_of(torchrun | {"TORCHELASTIC_RESTART_COUNT": "2"}, 2)
    assert (again.attempt, place_of(torchrun, 2).attempt) == (2, 0)


def on_two_hosts(rank: int, daemon: str) -> dict[str, str]:
    """What Open MPI 4 sets where one rank runs on each host, and mpirun on the first."""
    own = {"OMPI_COMM_WORLD_LOCAL_SIZE": "1", "OMPI_MCA_orte_hnp_uri": "7.0;tcp://192.168.200.12,10.0.0.5:54977"}
    return open_mpi(rank) | own | {"OMPI_MCA_orte_local_daemon_uri": daemon}


def test_ranks_on_two_hosts_meet_where_mpirun_runs() -> None:
    first = on_two_hosts(0, "7.0;tcp://192.168.200.12,10.0.0.5:54977")
    for place in (place_of(first, 2), place_of(on_two_hosts(1, "7.1;tcp://192.168.200.13:1"), 2)):
        assert (place.here, place.host, place.others) == (1, "192.168.200.12", ("10.0.0.5",))
    with pytest.raises(ConfigError, match=r"rank 0 is not on the host where mpirun runs.*-x MASTER_ADDR"):
        place_of(on_two_hosts(0, "7.1;tcp://192.168.200.13:1"), 2)
    assert place_of(first | {"MASTER_ADDR": "10.9.9.9"}, 2)[3:5] == ("10.9.9.9", place_of(first, 2).port)


def test_what_mpirun_binds_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    place = place_of(open_mpi(0), 2)
    assert "compute on 1 of 8 cores; give mpirun --bind-to none" in place.bound(
        {"OMPI_MCA_orte_bound_at_launch": "1"}, 1
    )
    assert place.bound({"OMPI_MCA_orte_bound_at_launch": "1"}, 4) == place.bound({}, 1) == ""


def test_a_launchers_ranks_compute_one_target(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sametoken.parallel.lead.CLOSING", [print])
    with pytest.raises(ConfigError, match="mpirun started 2 ranks, which compute one target, and this process has"):
        lead(open_mpi(0), 2, check=False)


@pytest.mark.parametrize(("own", "sharing"), [(set(range(4)), 2), ({0, 1}, 1), ({1, 2}, 2)])
def test_ranks_that_share_cores_divide_the_threads(
    own: set[int], sharing: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 1 may use the cores 2 and 3; srun and mpirun may give each rank its own."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: own)
    (host, cores) = own_cores()
    assert cores == sorted(own)
    others = [(host, cores), (host, [2, 3]), ("another", cores)]
    assert sum(shares_cores((host, cores), other) for other in others) == sharing


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        (open_mpi(0, 4), "mpirun started 4 processes, and tensor_parallel_size is 2; .* --tp_size 4"),
        (
            {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_SIZE": "1"},
            "-x MASTER_ADDR",
        ),
        ({"RANK": "one", "WORLD_SIZE": "2"}, "RANK='one' in the environment: expected a number"),
    ],
)
def test_launchers_that_say_something_else(environment: dict[str, str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        place_of(environment, 2)


def test_an_interrupted_forward_is_raised_and_the_next_one_does_not_wait(
    models: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C comes while results are added in Python, which compiled code calls where ranks share no memory."""
    monkeypatch.setenv(MEMORY_SWITCH, "off")
    llm = make_llm(*models, dtype="bfloat16", tensor_parallel_size=2)
    assert llm.ranks is not None

    def interrupted(part: torch.Tensor) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(llm.ranks.target, "sum", interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(prompts(1), GREEDY)
    with pytest.raises(EngineError, match="interrupted"):
        llm.generate(prompts(1), GREEDY)
    llm.ranks.close()
    assert llm.ranks.processes[1].returncode is not None


def test_one_rank_takes_no_notice_of_a_launcher() -> None:
    join({"RANK": "3", "WORLD_SIZE": "4"}, 1)
    join({"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "RANK": "none"}, 1)


def test_a_message_names_nothing_but_messages() -> None:
    message = Forward(0, Changes([], {0: [1, 2]}), [5, 6], [])
    assert read(pickle.dumps(message)) == message
    with pytest.raises(pickle.UnpicklingError, match="subprocess"):
        read(pickle.dumps(subprocess.run))
