"""The documented deployment on two hosts: mpirun over ssh and torchrun start it, and each mistake is said at once."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import pytest
from two_hosts import INTERFACE, Host, hostfile, inner, kill, missing, two_hosts

import tiny_models
from cli_checks import speak
from engine_checks import sharpen
from head_checks import eagle_config, shape_of, write_head
from head_makers import random_head
from quantised_makers import quantised
from sametoken import LLM, embedded
from server_checks import running, wait_until

REASON = (
    "" if os.environ.get("SAMETOKEN_DISTRIBUTED") else "two hosts need root, mpirun and sshd: make test-distributed"
)
pytestmark = pytest.mark.skipif(bool(REASON), reason=REASON)
Hosts = tuple[Host, Host]

PLAYBOOK = (Path(__file__).parents[1] / "playbooks" / "two_nodes.yml").read_text(encoding="utf-8")
URL = "http://localhost:8355/v1/chat/completions"
BODY = {"messages": [{"role": "user", "content": "Paris is great because"}], "max_tokens": 64, "logprobs": True}
ENDS_S, SAYS_S = 10.0, 30.0  # after a rank is gone, and until a mistake is said
STARTS_S = 80.0  # on a machine that has other work


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    """Both hosts; the first has the hostfile and the settings of mpirun that the document's containers have."""
    assert missing() == ""
    with two_hosts(tmp_path_factory.mktemp("hosts")) as both:
        both[0].environment |= {
            "OMPI_MCA_orte_default_hostfile": str(hostfile(both)), "OMPI_MCA_rmaps_ppr_n_pernode": "1",
            "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        }  # fmt: skip
        yield both


@pytest.fixture(autouse=True)
def nobody_is_left(hosts: Hosts) -> Iterator[None]:
    """After each test no process of ours runs on any host."""
    yield
    for host in hosts:
        wait_until(lambda host=host: not host.processes("sametoken.cli"), ENDS_S)  # type: ignore[misc]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[str, str]]:
    """Targets with their EAGLE-3 heads: trained ones, then random ones with experts and with weights in few bits."""
    root = tmp_path_factory.mktemp("models")
    sharpen(tiny_models.build("qwen-3-moe")).save_pretrained(root / "moe")
    wide = sharpen(tiny_models.build("llama-3", hidden_size=256, intermediate_size=256))
    wide.save_pretrained(root / "wide")
    speak(root / "moe")
    speak(root / "wide")
    quantised(root / "wide", "awq", root / "quantised")
    for name in ("moe", "quantised"):
        shape = replace(shape_of(str(root / name)), experts=None)  # a head has none
        write_head(random_head(eagle_config(shape)), root / f"{name}-head", shape, target_name=name)
    trained = {"dense": (str(embedded.target(embedded.NAME)), str(embedded.draft(embedded.HEAD_NAME)))}
    return trained | {name: (str(root / name), str(root / f"{name}-head")) for name in ("moe", "quantised")}


def settings(host: Host, draft: str) -> Path:
    """The document's file, which only the first host has, with another head and in float32."""
    place = host.folder / "extra-llm-api-config.yml"
    place.write_text(f"dtype: float32\n{PLAYBOOK}".replace("/opt/Qwen3-235B-A22B-Eagle3/", draft))
    return place


def serving(model: str, file: Path | None = None, *more: str) -> list[str]:
    """The document's command with the name of the program replaced."""
    said = [] if file is None else ["--extra_llm_api_options", str(file)]
    line = f"--backend pytorch --tp_size 2 --max_num_tokens 1024 {' '.join(said)} --port 8355 --host 0.0.0.0"
    return ["sametoken", "serve", model, *line.split(), *more]


def mpirun(*command: str, options: Sequence[str] = ()) -> list[str]:
    variables = ("CPATH=/usr/local/cuda/include", "TRITON_PTXAS_PATH=/usr/local/cuda/bin/ptxas", "HF_TOKEN")
    return ["mpirun", *(part for name in variables for part in ("-x", name)), *options, *command]


class Job:
    """Processes of a launcher, and what they have written."""

    def __init__(self, processes: Sequence[subprocess.Popen[str]]) -> None:
        self.processes, self.lines = processes, [[] for _ in processes]  # type: ignore[var-annotated]
        self.readers = [
            threading.Thread(target=lines.extend, args=(process.stderr,))
            for process, lines in zip(processes, self.lines, strict=True)
        ]
        for reader in self.readers:
            reader.start()

    @property
    def said(self) -> list[str]:
        return ["".join(lines) for lines in self.lines]

    @property
    def words(self) -> str:
        return "\n".join(self.said)

    def ends(self, seconds: float) -> list[int]:
        """The exit codes, once all have ended and their output is read."""
        end = time.monotonic() + seconds
        codes = [process.wait(max(0.1, end - time.monotonic())) for process in self.processes]
        for reader in self.readers:
            reader.join(5)
        return codes


@contextmanager
def started(*each: tuple[Host, list[str]], **environment: str) -> Iterator[Job]:
    processes = [host.start(*command, environment={"HF_TOKEN": "hf_x", **environment}) for host, command in each]
    job = Job(processes)
    try:
        yield job
    finally:
        if any(
            process.poll() is None for process in processes
        ):  # the test has failed: what they started holds their output
            for host, _ in each:
                for number in (*host.processes("sametoken"), *host.processes("mpirun")):
                    with suppress(ProcessLookupError):
                        os.kill(number, signal.SIGKILL)
            for process in processes:
                process.wait(10)
        for process in processes:
            kill(process)


def ask(host: Host, job: Job, body: dict[str, object] = BODY, url: str = URL) -> dict[str, object]:
    """The document's curl on a host, as soon as the server answers."""
    end = time.monotonic() + 60
    while time.monotonic() < end:
        if any(process.poll() is not None for process in job.processes):
            raise AssertionError(job.words)
        answer = host.run("curl", "-s", url, "-H", "Content-Type: application/json", "-d", json.dumps(body))
        if answer.returncode == 0:
            found = json.loads(answer.stdout)
            assert "choices" in found, found
            return dict(found["choices"][0])
        time.sleep(0.3)
    raise AssertionError(job.words)


def alone(target: str, draft: str, body: dict[str, object]) -> dict[str, object]:
    """What one process answers."""
    llm = LLM(target, draft, {"max_draft_len": 3}, dtype="float32")
    with running(llm) as server:
        return dict(server.post("/v1/chat/completions", body).json()["choices"][0])


def tokens(choice: dict[str, object]) -> list[str]:
    found = choice["logprobs"]
    assert isinstance(found, dict)
    return [each["token"] for each in found["content"]]


@pytest.mark.parametrize("name", ["dense", "moe", "quantised"])
def test_the_documents_line_answers_with_the_tokens_of_one_process(
    hosts: Hosts, models: dict[str, tuple[str, str]], name: str
) -> None:
    target, draft = models[name]
    greedy, sampled = {**BODY, "temperature": 0}, {**BODY, "temperature": 0.8, "seed": 4}
    with started((hosts[0], mpirun(*serving(target, settings(hosts[0], draft))))) as job:
        found = [ask(hosts[0], job, body) for body in (greedy, sampled)]
        assert [len(host.processes("sametoken.cli")) for host in hosts] == [1, 1]
    for body, choice in zip((greedy, sampled), found, strict=True):
        expected = alone(target, draft, body)
        assert (tokens(choice), choice["message"]) == (tokens(expected), expected["message"])
    assert "method eagle3" in job.said[0]
    assert "mpirun lets this rank compute on 1 of" in job.said[0]


def torchrun(rank: int, first: Host, *command: str) -> list[str]:
    meeting = ["--nnodes", "2", "--nproc-per-node", "1", "--node-rank", str(rank)]
    meeting += ["--master-addr", first.address, "--master-port", "29400"]
    return ["torchrun", *meeting, "-m", "sametoken.cli", *command[1:]]


def torchruns(hosts: Hosts, *command: str) -> list[tuple[Host, list[str]]]:
    return [(host, torchrun(rank, hosts[0], *command)) for rank, host in enumerate(hosts)]


def test_torchrun_starts_the_same(hosts: Hosts, models: dict[str, tuple[str, str]]) -> None:
    target, draft = models["dense"]
    body = {**BODY, "temperature": 0}
    with started(*torchruns(hosts, *serving(target, settings(hosts[0], draft)))) as job:
        found = ask(hosts[0], job, body)
        for process in job.processes:
            os.kill(inner(process), signal.SIGTERM)
        job.ends(30)
    assert tokens(found) == tokens(alone(target, draft, body))
    assert "SIGTERM: finishing open requests" in job.said[0]


def generating(model: str = "embedded", *more: str) -> list[str]:
    return ["sametoken", "generate", model, "--tp_size", "2", "--max-tokens", "8", "--temperature", "0", *more]


def test_standard_input_is_read_on_rank_0_only(hosts: Hosts) -> None:
    command = mpirun(*generating("embedded", "--prompt", "-"))
    process = hosts[0].start(*command, stdin=subprocess.PIPE)
    out, err = process.communicate("Once upon a time", timeout=60)
    assert process.returncode == 0, err
    assert out.count("\n") == 1


def test_a_rank_that_dies_ends_the_job(hosts: Hosts) -> None:
    with started((hosts[0], mpirun(*serving("embedded")))) as job:
        ask(hosts[0], job)
        (rank,) = hosts[1].processes("sametoken.cli")
        os.kill(rank, signal.SIGKILL)
        (code,) = job.ends(ENDS_S)
    assert code
    assert "rank 1" in job.said[0]
    assert "signal 9" in job.said[0]


def test_a_rank_that_hangs_is_named_and_open_streams_get_the_error(hosts: Hosts) -> None:
    with started((hosts[0], mpirun(*serving("embedded")))) as job:
        ask(hosts[0], job)
        body = {**BODY, "max_tokens": 200, "ignore_eos": True, "stream": True, "n": 8, "temperature": 1}
        stream = hosts[0].start("curl", "-sN", URL, "-H", "Content-Type: application/json", "-d", json.dumps(body))
        assert stream.stdout is not None
        stream.stdout.readline()
        (rank,) = hosts[1].processes("sametoken.cli")
        os.kill(rank, signal.SIGSTOP)
        begin = time.monotonic()
        assert "rank 1 of 2 has given no sign of life" in stream.communicate(timeout=30)[0]
        assert time.monotonic() - begin < ENDS_S
        os.kill(rank, signal.SIGCONT)
        job.ends(ENDS_S)


def test_sigterm_to_mpirun_lets_open_requests_end(hosts: Hosts) -> None:
    patient = ["--mca", "odls_base_sigkill_timeout", "10"]  # it waits so long in any case
    with started((hosts[0], mpirun(*serving("embedded"), options=patient))) as job:
        ask(hosts[0], job)
        body = {**BODY, "max_tokens": 100, "ignore_eos": True, "stream": True, "n": 8, "temperature": 1}
        stream = hosts[0].start("curl", "-sN", URL, "-H", "Content-Type: application/json", "-d", json.dumps(body))
        assert stream.stdout is not None
        stream.stdout.readline()
        os.kill(inner(job.processes[0]), signal.SIGTERM)
        assert stream.communicate(timeout=30)[0].strip().splitlines()[-1] == "data: [DONE]"
        job.ends(40)
    assert "Finished server process" in job.said[0]


# What goes wrong before the model is there.


def refused(*each: tuple[Host, list[str]], seconds: float = STARTS_S + SAYS_S, **environment: str) -> list[str]:
    """What processes say that all end with an error in time."""
    with started(*each, **environment) as job:
        assert all(job.ends(seconds)), job.said
    assert not any("Traceback" in said for said in job.said), job.said
    return job.said


def ranks(hosts: Hosts, *command: str) -> list[tuple[Host, list[str]]]:
    """One process a host with only the variables of ranks, so that each error is seen and no launcher ends anybody."""
    names = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": hosts[0].address, "MASTER_PORT": "29500"}
    said = [f"{name}={value}" for name, value in names.items()]
    return [(host, ["env", f"RANK={rank}", *said, *command]) for rank, host in enumerate(hosts)]


COMMAND = generating("embedded", "--prompt", "a")


def test_a_host_that_cannot_be_reached(hosts: Hosts, tmp_path: Path) -> None:
    place = tmp_path / "hostfile"
    place.write_text(f"{hosts[0].address}\n192.168.200.99\n")
    (said,) = refused((hosts[0], mpirun(*COMMAND, options=["--hostfile", str(place)])))
    assert "192.168.200.99" in said
    assert "No route to host" in said


def test_a_rank_that_never_comes(hosts: Hosts) -> None:
    first, second = ranks(hosts, *COMMAND)
    assert "rank 1 of 2 did not come within 25 s" in refused(first)[0]
    assert f"rank 1 does not reach rank 0 at {hosts[0].address}:29500" in refused(second)[0]


@pytest.mark.parametrize(("interface", "here"), [("eth7", "eth7"), ("lo", "lo"), (f"{INTERFACE},eth7", "eth7")])
def test_a_wrong_interface_is_named_on_each_host(hosts: Hosts, interface: str, here: str) -> None:
    for said in refused(*ranks(hosts, *COMMAND), GLOO_SOCKET_IFNAME=interface):
        assert re.search(rf"does not reach the other ranks by GLOO_SOCKET_IFNAME=\S*{here}", said), said
        assert f"this host has lo, {INTERFACE}" in said


def test_the_right_interface_is_used(hosts: Hosts) -> None:
    with started(*ranks(hosts, *COMMAND), GLOO_SOCKET_IFNAME=INTERFACE) as job:
        assert job.ends(STARTS_S + SAYS_S) == [0, 0], job.said


DOCUMENTED = {  # what the documents of the two machines give to mpirun
    "HF_TOKEN": "hf_of_a", "NCCL_SOCKET_IFNAME": INTERFACE, "UCX_NET_DEVICES": INTERFACE,
    "OMPI_MCA_btl_tcp_if_include": INTERFACE,
}  # fmt: skip
SHOWS = "import json, os, socket; print(json.dumps([socket.gethostname(), dict(os.environ)]), flush=True)"


def variables_of_ranks(hosts: Hosts, *forwarded: str) -> dict[str, dict[str, str]]:
    """The environment of each host's rank, by the host's name, where mpirun forwards these variables."""
    options = [part for name in forwarded for part in ("-x", name)]
    done = hosts[0].run("mpirun", *options, "sametoken-python", "-c", SHOWS, environment=DOCUMENTED)
    assert done.returncode == 0, done.stderr
    return dict(json.loads(line) for line in done.stdout.splitlines())


def test_the_documents_variables_arrive_on_the_other_host(hosts: Hosts) -> None:
    found = variables_of_ranks(hosts, *DOCUMENTED)
    assert found.keys() == {host.name for host in hosts}
    for environment in found.values():
        assert {name: environment.get(name) for name in DOCUMENTED} == DOCUMENTED


def test_a_token_that_is_not_forwarded_is_missing_on_the_other_host_alone(hosts: Hosts) -> None:
    found = variables_of_ranks(hosts, "NCCL_SOCKET_IFNAME")
    assert found[hosts[0].name]["HF_TOKEN"] == DOCUMENTED["HF_TOKEN"]
    assert "HF_TOKEN" not in found[hosts[1].name]
    assert found[hosts[1].name]["NCCL_SOCKET_IFNAME"] == INTERFACE


@pytest.fixture
def second_cable(hosts: Hosts) -> Iterator[str]:
    """A further interface on both hosts, joined by a cable of its own."""
    name = "enp2s0"
    ends = [["name", name, "netns", str(host.first)] for host in hosts]
    subprocess.run(["ip", "link", "add", *ends[0], "type", "veth", "peer", *ends[1]], check=True)
    for place, host in enumerate(hosts):
        host.root(f"ip addr add 192.168.201.{12 + place}/24 dev {name}; ip link set {name} up")
    yield name
    hosts[0].root(f"ip link del {name}")


def test_ranks_talk_by_the_interface_that_is_named(hosts: Hosts, second_cable: str) -> None:
    def received(interface: str) -> int:
        told = hosts[0].run("ip", "-j", "-s", "link", "show", "dev", interface).stdout
        return int(json.loads(told)[0]["stats64"]["rx"]["bytes"])

    for named, other in ((INTERFACE, second_cable), (second_cable, INTERFACE)):
        before = received(named), received(other)
        options = ["-x", "GLOO_SOCKET_IFNAME", "--mca", "btl_tcp_if_include", INTERFACE]
        command = mpirun(*COMMAND, options=options)
        with started((hosts[0], command), GLOO_SOCKET_IFNAME=named) as job:
            assert job.ends(STARTS_S + SAYS_S) == [0], job.said
        arrived = received(named) - before[0], received(other) - before[1]
        assert arrived[0] > 2 * arrived[1], arrived


@pytest.mark.parametrize(("port", "command"), [("29600", COMMAND), ("8355", serving("embedded"))])
def test_a_port_that_is_taken(hosts: Hosts, port: str, command: list[str]) -> None:
    code = f"import socket; taken = socket.create_server(('', {port})); print(1, flush=True); input()"
    taken = hosts[0].start("sametoken-python", "-c", code, stdin=subprocess.PIPE)
    try:
        assert taken.stdout is not None
        taken.stdout.readline()
        (said,) = refused((hosts[0], mpirun(*command, options=["-x", "MASTER_PORT=29600"])))
    finally:
        kill(taken)
    assert port in said
    assert re.search("cannot listen|in use|taken", said), said


def test_another_version_on_a_host(hosts: Hosts) -> None:
    place = hosts[1].folder / "packages" / "sametoken-9.9.dist-info"
    place.mkdir(parents=True)
    (place / "METADATA").write_text("Metadata-Version: 2.1\nName: sametoken\nVersion: 9.9\n")
    try:
        for said in refused(*ranks(hosts, *COMMAND)):
            assert re.search(r"rank 1 has sametoken 9\.9 and rank 0 has \d\.\d.*; start all ranks with the same", said)
    finally:
        (place / "METADATA").unlink()
        place.rmdir()


def test_other_files_on_a_host(hosts: Hosts, models: dict[str, tuple[str, str]]) -> None:
    (model := hosts[0].folder / "model").mkdir()
    for host, name in zip(hosts, ("moe", "quantised"), strict=True):
        host.root(f"mount --bind {models[name][0]} {model}")
    try:
        first, _ = refused(*ranks(hosts, *generating(str(model), "--prompt", "a")))
        assert re.search(r"rank 1 has other files of \S+ than rank 0 .*; copy the same checkpoint to all hosts", first)
        (said,) = refused((hosts[0], mpirun(*generating(str(model), "--prompt", "a"))))
        assert "rank 1 has other files" in said
    finally:
        for host in hosts:
            host.root(f"umount {model}")


def test_a_host_without_memory(hosts: Hosts, tmp_path: Path) -> None:
    (tmp_path / "meminfo").write_text("MemTotal: 1000000 kB\nMemAvailable: 1000 kB\n")
    hosts[1].root(f"mount --bind {tmp_path}/meminfo /proc/meminfo")
    try:
        for said in refused(*ranks(hosts, *COMMAND)):
            assert re.search(r"rank 1.*the weights of \S*embedded\S* take .* GB .* GB are free", said), said
    finally:
        hosts[1].root("umount /proc/meminfo")


def test_another_number_of_ranks(hosts: Hosts) -> None:
    command = generating("embedded", "--prompt", "a")
    command[command.index("2")] = "3"
    for said in refused(*ranks(hosts, *command)):
        assert "torchrun started 2 processes, and tensor_parallel_size is 3" in said


def test_a_second_target_of_one_process_is_refused(hosts: Hosts) -> None:
    code = "from sametoken import LLM\nfor _ in range(2): LLM('embedded', tensor_parallel_size=2)"
    with started((hosts[0], mpirun("sametoken-python", "-c", code))) as job:
        assert all(job.ends(STARTS_S + SAYS_S))
    assert "mpirun started 2 ranks, which compute one target, and this process has made one already" in job.said[0]


def deploying(hosts: Hosts, *more: str) -> list[str]:
    pair = ",".join(host.address for host in hosts)
    return ["sametoken", "deploy", "two-node", "--hosts", pair, "--interface", INTERFACE, "--port", "8355", *more]


def first_answer(job: Job) -> str:
    """The line in which the command tells what the server answered: from then on a signal ends it with code 0."""
    out = job.processes[0].stdout
    assert out is not None
    return next(line for line in out if " answers: " in line)


def test_deploy_serves_until_it_is_told_to_end(hosts: Hosts) -> None:
    with started((hosts[0], deploying(hosts, "embedded"))) as job:
        stream = ask(hosts[0], job, url=URL.replace("localhost", hosts[0].address))
        assert stream["message"]
        os.kill(inner(job.processes[0]), signal.SIGTERM)
        assert job.ends(STARTS_S) == [0], job.words
        out = job.processes[0].stdout
        assert out is not None
        printed = out.read()
    assert "same versions, same files, enough memory" in printed
    assert f"http://{hosts[0].address}:8355 answers: " in printed
    assert "SIGUSR1: finishing open requests" in job.said[0]


def rank_key(process: int) -> str:
    """The key in the environment of a rank."""
    words = Path(f"/proc/{process}/environ").read_text().split("\0")
    return next(word.partition("=")[2] for word in words if word.startswith("SAMETOKEN_RANK_KEY="))


def test_deploy_keeps_the_keys_off_command_lines_and_ends_with_the_terminal(hosts: Hosts) -> None:
    """Only the command that was typed has the server's key, and none that of the ranks, which both ranks have.

    SIGHUP, which a terminal sends when it closes, ends both ranks.
    """
    with started((hosts[0], deploying(hosts, "embedded", "--api-key", "sk-secret"))) as job:
        url = f"http://{hosts[0].address}:8355/v1/models"

        def code(*options: str) -> str:
            return hosts[0].run("curl", "-s", "-o", "/dev/null", "-w", "%{http_code}", url, *options).stdout

        wait_until(lambda: code("-H", "Authorization: Bearer sk-secret") == "200", STARTS_S)
        assert code() == "401"
        ranks = [host.processes("serve embedded") for host in hosts]
        assert all(ranks), job.words
        own = inner(job.processes[0])
        wait_until(lambda: {*hosts[0].processes("sk-secret")} == {own}, STARTS_S)  # a child has its words before exec
        assert hosts[1].processes("sk-secret") == []
        own_ranks = [{*host.processes("-m sametoken.cli serve")} - {*host.processes("mpirun")} for host in hosts]
        assert [len(here) for here in own_ranks] == [1, 1]
        key, other = (rank_key(*here) for here in own_ranks)
        assert len(key) == 32
        assert key == other
        assert not any(host.processes(key) for host in hosts)
        assert first_answer(job)
        os.kill(own, signal.SIGHUP)
        assert job.ends(STARTS_S) == [0], job.words


def test_deploy_ends_before_the_server_answers(hosts: Hosts) -> None:
    with started((hosts[0], deploying(hosts, "embedded"))) as job:
        wait_until(lambda: bool(hosts[0].processes("mpirun")), STARTS_S)
        os.kill(inner(job.processes[0]), signal.SIGINT)
        assert job.ends(STARTS_S) == [130], job.words


def test_deploy_refuses_a_host_that_ssh_does_not_reach(hosts: Hosts) -> None:
    command = deploying((hosts[0], replace(hosts[1], address="192.168.200.99")), "embedded")
    (said,) = refused((hosts[0], command))
    assert "ssh 192.168.200.99 failed" in said
