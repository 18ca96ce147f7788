"""ctypes declarations of the compiled library's structures, field by field as in its headers.

The owner of a structure must keep the tensors alive that the structure points to.
"""

from __future__ import annotations

from ctypes import POINTER, Structure, c_float, c_int32, c_int64, c_uint32, c_void_p
from functools import cache
from typing import Any

from torch import Tensor


class Weight(Structure):
    """Structure of rows.h."""

    _fields_ = [
        ("format", c_int32), ("inputs", c_int32), ("outputs", c_int32), ("group", c_int32),
        ("matrix", c_int32), ("data", c_void_p), ("scale", c_void_p), ("bias", c_void_p),
    ]  # fmt: skip


class CGate(Structure):
    """Structure of pointwise.h."""

    _fields_ = [("activation", c_int32), ("gain", c_float), ("limit", c_float)]


class CExperts(Structure):
    """Structure of experts.h."""

    _fields_ = [
        ("count", c_int32), ("chosen", c_int32), ("width", c_int32), ("shared", c_int32), ("normalised", c_int32),
        ("sigmoid", c_int32), ("groups", c_int32), ("chosen_groups", c_int32), ("group_best", c_int32),
        ("choice_bias", c_void_p), ("weight_scale", c_float), ("shared_gate", c_int32), ("wide_router", c_int32),
        ("weighted_input", c_int32), ("gate", CGate), ("router", Weight), ("gate_up", POINTER(Weight)),
        ("down", POINTER(Weight)),
    ]  # fmt: skip
    kept: Tensor | None  # target of `choice_bias`


class Layer(Structure):
    """Structure of forward.h."""

    _fields_ = [
        ("attention_norm", c_void_p), ("q_norm", c_void_p), ("k_norm", c_void_p), ("mlp_norm", c_void_p),
        ("qkv", Weight), ("out", Weight), ("gate_up", Weight), ("down", Weight), ("window", c_int64),
        ("sinks", c_void_p), ("experts", POINTER(CExperts)),
        ("attention_out_norm", c_void_p), ("mlp_out_norm", c_void_p), ("cos", c_void_p), ("sin", c_void_p),
        ("query_scale", c_void_p),
    ]  # fmt: skip


class Join(Structure):
    """Structure of forward.h."""

    _fields_ = [
        ("fc", POINTER(Weight)), ("paired", c_int32), ("normed_residual", c_int32), ("embed_norm", c_void_p),
        ("hidden_norm", c_void_p), ("whole_norm", c_void_p), ("part_norms", c_void_p), ("parts", c_int32),
        ("hidden_first", c_int32),
    ]  # fmt: skip


class Model(Structure):
    """Structure of forward.h."""

    _fields_ = [
        ("layers", c_int32), ("hidden", c_int32), ("heads", c_int32), ("kv_heads", c_int32), ("head_size", c_int32),
        ("rotated", c_int32), ("intermediate", c_int32), ("activation", c_int32), ("eps", c_float),
        ("vocabulary", c_int64), ("embed", c_void_p), ("table", POINTER(Weight)), ("positions", c_int64),
        ("layer", POINTER(Layer)), ("join", POINTER(Join)), ("whole_norms", c_int32), ("interleaved", c_int32),
        ("norm_shift", c_float), ("embed_scale", c_float), ("residual_scale", c_float), ("attention_scale", c_float),
        ("attention_cap", c_float), ("chunks", c_int32), ("wide_rotation", c_int32),
        ("rotated_norm", c_int32), ("sum", c_void_p), ("ranks", c_void_p),
    ]  # fmt: skip


class CExchange(Structure):
    """Structure of exchange.h."""

    _fields_ = [
        ("memory", c_void_p), ("slot", c_int64), ("rank", c_int32), ("size", c_int32), ("round", c_uint32),
        ("stopped", c_int32),
    ]  # fmt: skip


class Pages(Structure):
    """Structure of forward.h."""

    _fields_ = [
        ("keys", c_void_p), ("values", c_void_p), ("layer_stride", c_int64), ("page_size", c_int64),
        ("table_stride", c_int64), ("table", c_void_p),
        ("key_scales", c_void_p), ("value_scales", c_void_p), ("slots", c_int64), ("form", c_int32),
    ]  # fmt: skip


class CSpan(Structure):
    """Structure of attention.h."""

    _fields_ = [
        ("batch", c_int32), ("nodes", c_int32), ("total", c_int32),
        ("rows", c_void_p), ("starts", c_void_p), ("ancestors", c_void_p),
    ]  # fmt: skip


class Output(Structure):
    """Structure of decoder.cpp."""

    _fields_ = [
        ("head", POINTER(Weight)), ("norm", c_void_p), ("ids", c_void_p), ("recycled", c_int32),
        ("scale", c_float), ("cap", c_float), ("outputs", c_int64), ("begins", c_void_p), ("gather", c_void_p),
    ]  # fmt: skip


class Feed(Structure):
    """Structure of decoder.cpp."""

    _fields_ = [("span", CSpan), ("tokens", c_void_p), ("lengths", c_void_p), ("features", c_void_p)]


class Draw(Structure):
    """Structure of draw.h."""

    _fields_ = [
        ("seeds", c_void_p), ("positions", c_void_p), ("temperature", c_void_p), ("noise_scale", c_void_p),
        ("max_cost", c_void_p), ("top_k", c_void_p), ("top_p", c_void_p),
    ]  # fmt: skip


class Growth(Structure):
    """Structure of grow.h."""

    _fields_ = [
        ("branches", c_int32), ("levels", c_int32), ("most", c_int32), ("limits", c_void_p), ("budgets", c_void_p),
        ("tokens", c_void_p), ("parents", c_void_p), ("written", c_void_p), ("nodes", c_int32),
    ]  # fmt: skip


class CWorth(Structure):
    """Structure of stop.h."""

    _fields_ = [
        ("chances", c_void_p), ("typical", c_void_p), ("sampled", c_void_p), ("limits", c_void_p),
        ("siblings", c_void_p), ("weights", c_void_p), ("verify", c_float), ("guess", c_float), ("level", c_float),
        ("bins", c_int32), ("ranks", c_int32), ("most", c_int32), ("candidates", c_void_p), ("parents", c_void_p),
        ("written", c_void_p), ("made", c_void_p), ("kept", c_void_p),
    ]  # fmt: skip


class Packing(Structure):
    """Structure of pack.h."""

    _fields_ = [
        ("source", c_void_p), ("rows", c_int64), ("row_bytes", c_int64), ("stride", c_int64), ("target", c_void_p),
        ("first", c_int64), ("outputs", c_int64), ("units", c_int64),
    ]  # fmt: skip


class Int4Rounding(Structure):
    """Structure of round.h."""

    _fields_ = [
        ("weight", c_void_p), ("outputs", c_int64), ("inputs", c_int64), ("stride", c_int64), ("units", c_int64),
        ("group", c_int32), ("count", c_int32), ("factors", c_void_p), ("data", c_void_p), ("scale", c_void_p),
    ]  # fmt: skip


class CodedRows(Structure):
    """Structure of pack.h."""

    _fields_ = [
        ("codes", c_void_p), ("rows", c_int64), ("row_bytes", c_int64), ("format", c_int32), ("inputs", c_int32),
        ("group", c_int32), ("zero", c_int32), ("scale", c_void_p), ("offset", c_void_p), ("numbers", c_void_p),
    ]  # fmt: skip


# Transformations of a row's units: see Turn in pack.h.
AS_IS, FINITE_BF16, FLIPPED, FINITE_FP8, NIBBLES, NIBBLE_QUADS = range(6)


def address(tensor: Tensor | None) -> int | None:
    """Address of a contiguous tensor's data, for a structure; None (null) for None."""
    if tensor is None:
        return None
    assert tensor.is_contiguous()
    return tensor.data_ptr()


def struct_of(kind: type[Structure], **values: Any) -> Any:
    """Structure of type `kind`; values of pointers are given as tensors.

    Raises:
        TypeError: the structure has no such field; ctypes alone would accept the name and ignore it.
    """
    if not values.keys() <= _fields(kind):
        raise TypeError(f"{kind.__name__} has no field {', '.join(sorted(values.keys() - _fields(kind)))}")
    return kind(**{name: address(value) if isinstance(value, Tensor) else value for name, value in values.items()})


@cache
def _fields(kind: type[Structure]) -> frozenset[str]:
    return frozenset(field[0] for field in kind._fields_)
