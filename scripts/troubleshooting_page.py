"""Writes docs/troubleshooting.md from its rows: `make troubleshooting`. Tests check each row's words and test."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

PAGE = Path(__file__).parents[1] / "docs" / "troubleshooting.md"
HEAD = """\
# Troubleshooting

Written by `make troubleshooting`. Each row names what finds the cause: a command, or an error. Each row has a test that
provokes it. `--debug` shows where an error comes from.
"""


class Row(NamedTuple):
    """A symptom and its answer.

    Attributes:
        symptom: what a user sees. `cause`: why. `finds`: what names the cause. `todo`: what mends it.
        says: words of that error or report, as the package has them; "" for those of another program.
        test: what provokes it, as pytest names it.
    """

    symptom: str
    cause: str
    finds: str
    todo: str
    says: str
    test: str


MEMORY = (
    Row(
        "CUDA out of memory, or the process is killed at start",
        "weights, cache and activations are larger than the memory",
        "`sametoken doctor MODEL --draft DRAFT` before anything is loaded",
        "one of the changes that doctor lists: fewer sequences, a shorter context, int8 or int4, a smaller cache, "
        "ranks. A lower `kv_cache_free_gpu_memory_fraction` helps only where the weights fit",
        "would fit with",
        "tests/check/test_memory.py::test_what_would_make_it_fit",
    ),
    Row(
        "An error says that the weights do not fit",
        "the weights alone are larger than the free memory",
        "the error, before weights are read or downloaded",
        "`--quantization int8` or `int4`, a smaller model, or `--tp_size` over several hosts",
        "GB are free; use ",
        "tests/checkpoint/test_foreign_models.py::"
        "test_a_model_larger_than_the_memory_is_refused_before_its_weights_are_read",
    ),
    Row(
        "Memory runs out later, while the engine is built or runs",
        "other programs took memory since it was planned",
        "the error, one line instead of a traceback",
        "stop the other programs, or leave them room: `--kv-cache-free-memory-fraction 0.7`, smaller batches",
        "memory ran out: ",
        "tests/check/test_troubleshooting.py::test_memory_that_runs_out_is_one_line",
    ),
    Row(
        "Little memory is free on a machine whose GPU shares it (DGX Spark)",
        "cached files count as used for the GPU; on the CPU they count as free",
        "the error, where flushing would make the model fit",
        "`sudo sh -c 'sync; echo 3 > /proc/sys/vm/drop_caches'`",
        "the rest is taken by cached files",
        "tests/check/test_troubleshooting.py::test_cached_files_on_a_gpu_that_shares_memory",
    ),
    Row(
        "The context is shorter than the model's",
        "the cache holds fewer tokens than a whole context",
        "a warning at start, and an error where the length was asked for",
        "raise `--kv-cache-free-memory-fraction`, `--kv-cache-dtype int8`, or fewer sequences",
        "request a shorter context",
        "tests/engine/test_pools.py::test_a_pool_too_small_for_what_was_asked_is_refused",
    ),
)
FILES = (
    Row(
        "Cannot access gated repo",
        "the account of the token was not granted access",
        "the error names the page where access is asked for",
        "request access there, then set `HF_TOKEN` to a token of that account",
        "is gated: visit ",
        "tests/checkpoint/test_hub.py::test_gated_repository_asks_for_access",
    ),
    Row(
        "The token is refused (401)",
        "it is wrong or was revoked",
        "the error",
        "make a new token and set `HF_TOKEN`",
        "the Hub refused the token for ",
        "tests/checkpoint/test_hub.py::test_bad_token",
    ),
    Row(
        "Model download fails",
        "no connection, a proxy, or another endpoint is needed",
        "the error",
        "check the connection, the proxy and `HF_ENDPOINT`, or copy the directory; finished files are kept",
        " cannot be reached (",
        "tests/checkpoint/test_hub.py::test_no_connection_without_cache",
    ),
    Row(
        "The model or head is not found",
        "a wrong name, or a private repository without a token",
        "the error, with the nearest directory",
        "correct the name, or set `HF_TOKEN`",
        " was not found: neither a directory here",
        "tests/checkpoint/test_hub.py::test_unknown_repository_says_that_both_were_tried_and_what_is_near",
    ),
    Row(
        "The disk fills while downloading",
        "the cache's disk is smaller than the weights",
        "the error, before the download",
        "make room, or set `HF_HOME` to a directory on a larger disk",
        "room, or set HF_HOME to a directory on a larger disk",
        "tests/checkpoint/test_hub.py::test_weights_larger_than_the_disk_are_not_fetched",
    ),
    Row(
        "A model is refused as a head",
        "`doctor` and `export` want a head, and a model was given",
        "the error",
        "give the head's directory; a draft model needs no head",
        " is a whole model (",
        "tests/heads/test_head_commands.py::test_doctor_refuses_what_is_no_head_of_this_target",
    ),
    Row(
        "Keys of `speculative_config:` are not found",
        "the YAML file lost its indentation",
        "the error",
        "indent the keys below `speculative_config:`",
        "indentation was lost; indent the lines",
        "tests/dialects/test_dialects.py::test_lost_indentation_is_named_as_such",
    ),
)
START = (
    Row(
        "The server does not start: the port is taken",
        "another program listens there",
        "the error, before the model is loaded",
        "another `--port`, or stop what uses it; `--port 0` takes a free one",
        "cannot listen on ",
        "tests/server/test_server_stress.py::test_a_port_in_use_is_an_error_before_the_model_is_loaded",
    ),
    Row(
        "The server does not answer",
        "it is not up, listens on another address, or a firewall is between",
        "`sametoken doctor --url URL`",
        "compare `--host` and `--port`; `--host 0.0.0.0` answers other machines",
        "expected a running server with metrics",
        "tests/check/test_remote.py::test_wrong_options",
    ),
    Row(
        "The container fails to start, or there is none",
        "the machine has no container runtime, or it passes no GPU on",
        "`sametoken doctor` says what this machine computes with",
        "no container is needed: `pip install 'sametoken[server]'`; in one, `--gpus=all` makes CUDA devices visible",
        "this machine or this build of torch has no CUDA; use 'cpu'",
        "tests/check/test_troubleshooting.py::test_a_machine_without_cuda",
    ),
    Row(
        "Everything is slow on the CPU",
        "no compiled kernels are loaded",
        "`sametoken doctor`, and a warning when a model is loaded",
        "the command that doctor prints",
        "no compiled CPU kernels are loaded (",
        "tests/check/test_machine.py::test_without_kernels_the_reason_and_the_command_are_named",
    ),
)
HOSTS = (
    Row(
        "`mpirun` hangs, or a rank waits and then ends",
        "the addresses in the hostfile or in `MASTER_ADDR` are not those of the hosts, or rank 0 has not started",
        "the error of the rank that does not reach rank 0, within 30 s",
        "`MASTER_ADDR` is an address of rank 0's host (`ip addr show`), and its port is open",
        " does not reach rank 0 at ",
        "tests/check/test_troubleshooting.py::test_a_rank_that_does_not_reach_rank_0",
    ),
    Row(
        "`mpirun` starts ranks on several hosts and they do not meet",
        "`MASTER_ADDR` is not forwarded",
        "the error",
        "`mpirun -x MASTER_ADDR=ADDRESS`",
        "-x MASTER_ADDR=ADDRESS",
        "tests/parallel/test_ranks.py::test_launchers_that_say_something_else",
    ),
    Row(
        "`mpirun` ends with SSH refused, or Permission denied (publickey)",
        "the hosts cannot log in to each other without a password, or one is not reachable",
        "mpirun's own error, before any rank starts",
        "`ssh HOST true` must work from the first host to each other one: exchange the keys",
        "",
        "tests/distributed/test_two_hosts.py::test_a_host_that_cannot_be_reached",
    ),
    Row(
        "NCCL or gloo names a socket error, or ranks do not reach each other",
        "the wrong network interface",
        "the error of each rank, with the interfaces that its host has",
        "`GLOO_SOCKET_IFNAME`, forwarded with `-x`: the interface that joins the hosts",
        " does not reach the other ranks by ",
        "tests/distributed/test_two_hosts.py::test_a_wrong_interface_is_named_on_each_host",
    ),
    Row(
        "A download fails on another host only",
        "`HF_TOKEN` is not forwarded to its rank",
        "the error of that rank",
        "`-x HF_TOKEN` to mpirun, and `-e HF_TOKEN` to `docker exec` where ranks run in containers",
        "set HF_TOKEN if it is private",
        "tests/distributed/test_two_hosts.py::test_a_token_that_is_not_forwarded_is_missing_on_the_other_host_alone",
    ),
    Row(
        "Ranks have different versions or kernels",
        "another release or build is installed on a host",
        "the error, before weights are read",
        "install the same release on all hosts",
        "; start all ranks with the same",
        "tests/check/test_troubleshooting.py::test_ranks_of_different_versions",
    ),
    Row(
        "Ranks have different files",
        "a checkpoint was copied to one host only, or a download is older",
        "the error, with both digests",
        "copy the same checkpoint to all hosts",
        "; copy the same checkpoint to all hosts",
        "tests/parallel/test_ranks.py::test_ranks_that_load_other_files_end_with_one_error",
    ),
    Row(
        "The number of ranks is refused",
        "heads or widths cannot be divided by it",
        "the error, and `sametoken doctor MODEL --tp_size N`",
        "one of the numbers that the error lists",
        "use one of ",
        "tests/parallel/test_cut.py::test_a_number_of_ranks_that_does_not_divide_is_refused_with_those_that_do",
    ),
    Row(
        "A rank dies or hangs",
        "its host is down, out of memory, or the network is",
        "the error names the rank within 10 s",
        "look at that rank's own messages, then start all again",
        "look at its own messages",
        "tests/parallel/test_failures.py::test_a_rank_that_dies_or_hangs_is_named",
    ),
)
DRAFTS = (
    Row(
        "The draft is refused: another vocabulary or special tokens",
        "draft and target have different tokenizers",
        "the error, with the first token that differs",
        "a draft of the target's family, or a head trained for it",
        "the draft has another vocabulary: token ",
        "tests/checkpoint/test_tokenizer.py::test_draft_with_another_vocabulary_is_refused_at_the_first_difference",
    ),
    Row(
        "Hardly any guess is accepted",
        "the draft was trained for another target, chat template or layers",
        "a warning of the engine when none of the first guesses of 24 drafts was right, or hardly any of 200; "
        "`sametoken doctor --url URL`",
        "check what the draft was trained for with `sametoken doctor HEAD --target MODEL`, or leave it out",
        "chat template or another kind of head",
        "tests/engine/test_controller_engine.py::test_a_draft_that_is_always_wrong_is_given_up_and_named",
    ),
    Row(
        "Acceptance is far below the head's model card",
        "the head's layer ids are read another way than its trainer meant",
        "`sametoken doctor HEAD --target MODEL` measures both readings",
        "the `sametoken export --taps` that doctor prints; otherwise compare target and template with the card",
        "accepts clearly more ",
        "tests/heads/test_head_commands.py::test_advice_says_which_reading_is_meant_only_where_one_is_clearly_better",
    ),
    Row(
        "Speculation is slower than without",
        "drafts or extra rows cost more than accepted tokens save, often under load",
        "`sametoken doctor --url URL` on the running server, `sametoken bench --explain` on this machine",
        "what they advise; `--adaptive`, the default, drafts only where it was measured to be faster",
        "of forwards had no draft because drafting ",
        "tests/check/test_remote.py::test_a_controller_that_does_not_draft_is_named",
    ),
    Row(
        "The drafter takes most of the time",
        "it is too large for the target, or it runs in many steps",
        "`sametoken doctor --url URL`, `sametoken bench --explain`",
        "a head instead of a model, `--draft-quantization int8`, shorter drafts",
        "of the time: take a smaller draft",
        "tests/check/test_remote.py::test_a_drafter_that_takes_most_of_the_time",
    ),
    Row(
        "Later guesses are never accepted",
        "drafts are longer than the draft can see",
        "`sametoken doctor --url URL`",
        "the draft length that it advises",
        " and later ones come true in fewer than ",
        "tests/check/test_remote.py::test_what_costs_acceptance_or_time_is_named",
    ),
    Row(
        "Drafts are useless at long context",
        "the head was made for fewer positions than the target",
        "`sametoken doctor HEAD --target MODEL` notes it; `sametoken bench --prompt-len 512,8192 --explain` measures",
        "a head trained with longer texts (`sametoken prepare --max-len`), or `--method suffix` behind long prompts",
        " positions, the target for ",
        "tests/check/test_troubleshooting.py::test_a_head_for_fewer_positions_is_noted",
    ),
    Row(
        "Speculation is off although it was configured",
        "the server found no draft, or requests choose another method",
        "`sametoken doctor --url URL`; a warning after 32 requests that left the draft unused",
        "start the server with the option that doctor names, or leave `method` out of requests",
        "leave it ",
        "tests/engine/test_controller_engine.py::test_an_unused_draft_is_named",
    ),
    Row(
        "The output differs from plain decoding",
        "it never may: this would be a bug here; other engines allow it",
        "`sametoken verify MODEL --draft DRAFT` on your prompts",
        "report what it prints",
        "first difference: method ",
        "tests/check/test_proof_and_demo.py::test_verify_finds_a_broken_verifier_and_says_where",
    ),
)
SECTIONS = {
    "Memory": MEMORY,
    "Models and files": FILES,
    "Starting": START,
    "Several hosts": HOSTS,
    "Drafts and speed": DRAFTS,
}


def page() -> str:
    """The whole page."""
    parts = [HEAD]
    for title, rows in SECTIONS.items():
        parts.append(
            f"\n## {title}\n\n| symptom | cause | found by | what to do | tested by |\n|---|---|---|---|---|\n"
        )
        for row in rows:
            name = row.test.rpartition("::")[2].rpartition("/")[2]
            link = f"[`{name}`](../{row.test.partition('::')[0]})"
            parts.append(f"| {row.symptom} | {row.cause} | {row.finds} | {row.todo} | {link} |\n")
    return "".join(parts)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
