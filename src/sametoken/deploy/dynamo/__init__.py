"""Engine as a worker of NVIDIA Dynamo, started by `python -m sametoken.deploy.dynamo`."""
