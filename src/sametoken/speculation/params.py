"""Former module of the parameters of requests, whose names stay importable; see `sametoken.options.sampling`."""

from sametoken.options.sampling import RECOMMENDED, RequestSpeculation, SamplingParams

__all__ = ["RECOMMENDED", "RequestSpeculation", "SamplingParams"]
