"""Former location of the sampling parameters, kept for old imports; see `sametoken.options.sampling`."""

from sametoken.options.sampling import RECOMMENDED, RequestSpeculation, SamplingParams

__all__ = ["RECOMMENDED", "RequestSpeculation", "SamplingParams"]
