"""Our engine as a worker of NVIDIA Dynamo; `python -m sametoken.deploy.dynamo` starts one."""
