"""The former home of what a request may ask, whose names stay importable; `sametoken.options.sampling` has it."""

from sametoken.options.sampling import RECOMMENDED, RequestSpeculation, SamplingParams

__all__ = ["RECOMMENDED", "RequestSpeculation", "SamplingParams"]
