"""A plan as a script, a compose file, manifests for Kubernetes, a batch script, and a script with Dynamo."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from sametoken.deploy.plan.engines import ENGINES, TARGETS
from sametoken.deploy.plan.launch import Launch, Wanted
from sametoken.options.speculation import SpeculativeConfig

SPECULATIVE = SpeculativeConfig(method="eagle3", max_draft_len=2)


def launch(engine: str, keys: bool = False, **stated: Any) -> Launch:
    return ENGINES[engine](Wanted("/models/Llama 3.1", "org/head", "eagle3", SPECULATIVE, stated, keys))


def test_shell() -> None:
    assert (
        TARGETS["shell"](launch("trtllm", served_model_name=("llama",)))
        == """cat > trtllm.yml <<'END'
disable_overlap_scheduler: false
speculative_config:
  decoding_type: Eagle
  max_draft_len: 2
  speculative_model_dir: org/head
return_perf_metrics: true
END
trtllm-serve '/models/Llama 3.1' \\
    --backend pytorch \\
    --extra_llm_api_options trtllm.yml \\
    --host 127.0.0.1 \\
    --port 8000 \\
    --served_model_name llama
"""
    )


def test_compose() -> None:
    assert (
        TARGETS["compose"](launch("trtllm", tensor_parallel_size=2))
        == """services:
  llama-3-1:
    image: nvcr.io/nvidia/tensorrt-llm/release:1.2.0rc6
    entrypoint:
    - trtllm-serve
    command:
    - /models/Llama 3.1
    - --backend
    - pytorch
    - --extra_llm_api_options
    - /etc/sametoken/trtllm.yml
    - --host
    - 0.0.0.0
    - --port
    - '8000'
    - --served_model_name
    - /models/Llama 3.1
    ports:
    - 8000:8000
    environment:
    - HF_HOME=/cache/huggingface
    - HF_TOKEN
    volumes:
    - huggingface:/cache/huggingface
    - /models/Llama 3.1:/models/Llama 3.1:ro
    ipc: host
    restart: unless-stopped
    stop_grace_period: 60s
    healthcheck:
      test:
      - CMD
      - python3
      - -c
      - import urllib.request as u; u.urlopen('http://localhost:8000/health', timeout=5)
      interval: 10s
      timeout: 6s
      retries: 3
      start_period: 1800s
    configs:
    - source: trtllm-yml
      target: /etc/sametoken/trtllm.yml
    deploy:
      resources:
        reservations:
          devices:
          - driver: nvidia
            count: 2
            capabilities:
            - gpu
volumes:
  huggingface: {}
configs:
  trtllm-yml:
    content: |
      tensor_parallel_size: 2
      disable_overlap_scheduler: false
      speculative_config:
        decoding_type: Eagle
        max_draft_len: 2
        speculative_model_dir: org/head
      return_perf_metrics: true
"""
    )


def test_kubernetes() -> None:
    text = TARGETS["kubernetes"](launch("sametoken", keys=True, device="cpu", drain_seconds=20.0))
    deployment, service = yaml.safe_load_all(text)
    pod = deployment["spec"]["template"]
    assert pod["metadata"]["annotations"] == {
        "prometheus.io/scrape": "true", "prometheus.io/port": "8000", "prometheus.io/path": "/metrics",
    }  # fmt: skip
    assert pod["metadata"]["labels"] == deployment["spec"]["selector"]["matchLabels"] == service["spec"]["selector"]
    spec, (server,) = pod["spec"], pod["spec"]["containers"]
    assert spec["terminationGracePeriodSeconds"] == 65
    assert server["command"] == [
        "sametoken", "serve", "/models/Llama 3.1", "--draft", "org/head", "--method", "eagle3", "--device", "cpu",
        "--host", "0.0.0.0", "--port", "8000", "--drain-seconds", "20.0",
    ]  # fmt: skip
    assert server["lifecycle"] == {"preStop": {"exec": {"command": ["sleep", "5"]}}}
    assert [server[f"{probe}Probe"]["failureThreshold"] for probe in ("startup", "readiness", "liveness")] == [
        180,
        1,
        6,
    ]
    assert server["env"][2]["valueFrom"]["secretKeyRef"] == {"name": "llama-3-1", "key": "SAMETOKEN_API_KEY"}
    assert "resources" not in server
    assert {mount["name"] for mount in server["volumeMounts"]} == {volume["name"] for volume in spec["volumes"]}
    assert "&id" not in text


def test_a_config_map_holds_the_files() -> None:
    files, deployment, _ = yaml.safe_load_all(TARGETS["kubernetes"](launch("trtllm")))
    assert files["kind"] == "ConfigMap"
    assert "speculative_config" in files["data"]["trtllm.yml"]
    (server,) = deployment["spec"]["template"]["spec"]["containers"]
    assert "/etc/sametoken/trtllm.yml" in server["command"]
    assert server["resources"] == {"limits": {"nvidia.com/gpu": 1}}


def test_dynamo() -> None:
    assert (
        TARGETS["dynamo"](launch("vllm", cuda_graphs=False))
        == """#!/bin/bash
# etcd (port 2379) and NATS (port 4222) must run; set ETCD_ENDPOINTS and NATS_SERVER if they run on another host.
set -e
trap 'echo Cleaning up...; kill 0' EXIT
python -m dynamo.frontend --http-host=127.0.0.1 --http-port=8000 &
DYN_SYSTEM_PORT=8081 python -m dynamo.vllm \\
    --model '/models/Llama 3.1' \\
    --enforce-eager \\
    --speculative-config '{"method": "eagle3", "model": "org/head", "num_speculative_tokens": 2}' &
wait -n
"""
    )


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("target", ["shell", "slurm", "dynamo"])
def test_scripts_are_scripts(engine: str, target: str, tmp_path: Path) -> None:
    script = tmp_path / "script.sh"
    script.write_text(TARGETS[target](launch(engine)))
    checked = subprocess.run(["bash", "-n", script], capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stderr


@pytest.fixture
def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


FAKE = """
import http.server, signal, sys, time
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers(); self.wfile.write(b"ok")
    def log_message(self, *words): pass
signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def batch(tmp_path: Path, port: int, code: str) -> subprocess.Popen[str]:
    """The batch script with `srun` that starts a small server."""
    server = tmp_path / "server.py"
    server.write_text(code)
    srun = tmp_path / "srun"
    srun.write_text(f"#!/bin/bash\necho $$ > {tmp_path}/server.pid\nexec {sys.executable} {server} {port}\n")
    srun.chmod(0o755)
    scancel = tmp_path / "scancel"
    scancel.write_text(f'#!/bin/bash\necho "$@" > {tmp_path}/scancelled\nkill -TERM "$(cat {tmp_path}/server.pid)"\n')
    scancel.chmod(0o755)
    script = tmp_path / "job.sh"
    script.write_text(TARGETS["slurm"](launch("vllm", port=port)))
    environment = {**os.environ, "SLURM_JOB_ID": "41", "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    return subprocess.Popen(
        ["bash", script], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def test_a_batch_script_waits_and_ends_with_its_server(tmp_path: Path, free_port: int) -> None:
    job = batch(tmp_path, free_port, FAKE)
    assert job.stdout is not None
    assert job.stdout.readline().strip().endswith(f":{free_port} answers")
    job.terminate()
    job.communicate(timeout=20)
    assert job.returncode == 7
    assert (tmp_path / "scancelled").read_text() == "--signal=TERM 41.0\n", "a signal to srun would kill its tasks"


def test_a_batch_script_ends_when_its_server_does_not_start(tmp_path: Path, free_port: int) -> None:
    job = batch(tmp_path, free_port, "raise SystemExit(3)")
    job.communicate(timeout=20)
    assert job.returncode == 3


ACROSS = {
    "sametoken": "srun --nodes=2 --ntasks-per-node=1 --kill-on-bad-exit=1 sametoken serve",
    "trtllm": "srun --mpi=pmix --nodes=2 --ntasks-per-node=1 --kill-on-bad-exit=1 trtllm-llmapi-launch trtllm-serve",
    "vllm": """bash -c 'exec "$@" --nnodes 2 --node-rank "$SLURM_PROCID" --master-addr "$first" """,
    "sglang": """bash -c 'exec "$@" --nnodes 2 --node-rank "$SLURM_PROCID" --dist-init-addr "$first:20000"' serve""",
}


@pytest.mark.parametrize("engine", ENGINES)
def test_two_hosts_of_one_gpu_each(run: Any, engine: str) -> None:
    words = ("org/target", "--engine", engine, "--tp-size", "2", "--target", "slurm")
    device = ("--device", "cuda") if engine == "sametoken" else ()
    one, two = (run("deploy", "plan", *words, *device, *more) for more in ((), ("--nodes", "2")))
    assert {"#SBATCH --nodes=1", "#SBATCH --gpus=2"} <= set(one.out.splitlines())
    asked = {f"#SBATCH --{words}=1" for words in ("ntasks-per-node", "gpus-per-node")}
    assert {"#SBATCH --nodes=2", *asked} <= set(two.out.splitlines())
    assert ACROSS[engine] in two.out
    assert ACROSS[engine] not in one.out
    assert subprocess.run(["bash", "-n"], input=two.out, text=True, check=False).returncode == 0


def test_the_words_of_each_host_are_those_of_its_rank(run: Any, tmp_path: Path) -> None:
    """What srun would start on the second of two nodes."""
    words = ("--engine", "vllm", "--tp-size", "2", "--target", "slurm", "--nodes", "2")
    said = run("deploy", "plan", "org/target", *words)
    step = said.out.partition("--kill-on-bad-exit=1 ")[2].partition(" &\n")[0]
    (tmp_path / "vllm").write_text('#!/bin/bash\necho "$@"\n')
    (tmp_path / "vllm").chmod(0o755)
    for rank, last in (("0", ""), ("1", " --headless")):
        environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_PROCID": rank, "first": "10.0.0.1"}
        done = subprocess.run(["bash", "-c", step], env=environment, capture_output=True, text=True, check=True)
        assert done.stdout.endswith(f" --nnodes 2 --node-rank {rank} --master-addr 10.0.0.1{last}\n")


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (("--nodes", "2", "--target", "compose"), "--nodes is for --target slurm"),
        (("--nodes", "2", "--target", "slurm", "--tp-size", "3"), "--nodes 2 cannot share --tp-size 3 equally"),
        (("--nodes", "2", "--target", "slurm"), "--nodes 2 cannot share --tp-size 1 equally"),
        (("--nodes", "0", "--target", "slurm"), "--nodes 0: expected at least 1"),
    ],
)
def test_nodes_that_cannot_share_are_refused(run: Any, words: tuple[str, ...], problem: str) -> None:
    said = run("deploy", "plan", "org/target", "--engine", "vllm", *words)
    assert (said.code, said.out) == (2, "")
    assert problem in said.err
