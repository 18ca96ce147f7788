"""Calls of one variant of the compiled library.

The owner of a structure must keep the tensors alive that the structure points to.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from ctypes import POINTER, c_float, c_int32, c_int64, c_void_p
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from sametoken.kernels.cpu.memory import lent_memory
from sametoken.kernels.cpu.structures import (
    CExchange,
    CodedRows,
    CSpan,
    CWorth,
    Draw,
    Feed,
    Growth,
    Int4Rounding,
    Model,
    Output,
    Packing,
    Pages,
    Weight,
)
from sametoken.kernels.cpu.threads import threads_for

INTERFACE = 28  # as in decoder.cpp: libraries built from other sources may have other structures
BF16, INT8, INT8_WEIGHT_ONLY, INT4, FP8, FP4, GROUPED_INT4, GROUPED_INT8 = range(8)
BLOCK_INT4, BLOCK_INT5, BLOCK_INT6, BLOCK_INT8 = range(8, 12)
DRAW_WORK = 8  # cost of a sampled draw, in reads of weights as large as its logits
BLOCK_KINDS = ("Q8_0", "Q4_0", "MXFP4", "Q4_K", "Q5_K", "Q6_K", "Q5_0", "Q4_1", "Q5_1", "IQ4_NL", "IQ4_XS", "Q3_K",
               "Q2_K", "NVFP4", "TQ1_0", "TQ2_0")  # of llama.cpp, see BlockKind in gguf_blocks.h  # fmt: skip


class PackedWeight(NamedTuple):
    """Weight of a linear layer in the library's layout.

    Attributes:
        weight: C structure that points into `parts`.
        parts: tensors by name: "data", and "scale", "bias" and others as the format requires.
    """

    weight: Weight
    parts: Mapping[str, Tensor]

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.parts.values())


class Library:
    """One loaded variant of the library.

    Attributes:
        name: name of the variant.
        matrix: true if the processor's matrix unit multiplies weights that are packed for it.
    """

    def __init__(self, name: str, file: Path) -> None:
        self.name, self.matrix = name, name == "amx"
        library = ctypes.CDLL(str(file))
        found = getattr(library, "sametoken_interface", lambda: 0)()
        if found != INTERFACE:
            raise OSError("they were built from other sources; build them again")
        if self.matrix and not library.sametoken_matrix():
            raise OSError("the system does not let this process use the processor's matrix unit")
        self._linear, self._forward = library.sametoken_linear, library.sametoken_forward
        self._fuse, self._guess, self._grow = library.sametoken_fuse, library.sametoken_guess, library.sametoken_grow
        self._linear.argtypes = [
            POINTER(Weight), c_void_p, c_int32, c_void_p, c_float, c_float, c_int32, c_int32, c_void_p,
            c_int32, c_int32,
        ]  # fmt: skip
        self._forward.argtypes = [
            POINTER(Model), POINTER(Pages), POINTER(CSpan), c_int32, c_void_p, c_int32, c_void_p, POINTER(c_void_p),
            c_int32,
        ]  # fmt: skip

        self._fuse.argtypes = [POINTER(Model), c_void_p, c_int32, c_void_p, c_int32]
        self._guess.argtypes = [
            POINTER(Model), POINTER(Pages), POINTER(Feed), POINTER(Output), POINTER(Draw), POINTER(CWorth),
            c_void_p, c_void_p, c_int32, c_int32, c_int32,
        ]  # fmt: skip
        self._grow.argtypes = [
            POINTER(Model), POINTER(Pages), POINTER(Feed), POINTER(Output), POINTER(Draw), POINTER(Growth),
            c_int32, c_int32,
        ]  # fmt: skip
        self._sample = library.sametoken_sample
        self._sample.argtypes = [POINTER(Draw), c_void_p, c_int32, c_int32, c_int64, c_void_p, c_int32]
        self._pack, self._awq, self._blocks = library.sametoken_pack, library.sametoken_awq, library.sametoken_blocks
        self._pack.argtypes = [POINTER(Packing), c_int32, c_int32, c_int32]
        self._awq.argtypes = [c_void_p, c_int64, c_int64, c_void_p, c_int32]
        self._round_int4 = library.sametoken_round_int4
        self._round_int4.argtypes = [POINTER(Int4Rounding), c_int32]
        self._blocks.argtypes = [c_int32, c_void_p, c_int64, POINTER(c_void_p), c_int32]
        self._entries = library.sametoken_entries
        self._entries.argtypes = [c_void_p, c_int32, c_void_p, c_void_p, c_void_p, c_int64, c_void_p, c_int32]
        self._join = library.sametoken_join
        self._join.argtypes = [c_void_p, c_int64, c_int32, c_void_p, c_int32]
        self._numbers, self._check_fp8 = library.sametoken_numbers, library.sametoken_check_fp8
        self._numbers.argtypes = [POINTER(CodedRows), c_int32]
        self._check_fp8.argtypes = [c_void_p, c_int64, c_int32]
        self._rows = library.sametoken_rows
        self._rows.argtypes = [POINTER(Weight), c_void_p, c_int64, c_void_p]

        self._sum, self._send, self._gather = library.sametoken_sum, library.sametoken_send, library.sametoken_gather
        self._sum.argtypes = [POINTER(CExchange), c_void_p, c_int64]
        self._send.argtypes = [POINTER(CExchange), c_void_p, c_int64]
        self._gather.argtypes = [POINTER(CExchange), c_void_p, POINTER(c_int64), c_int64, c_int64, c_void_p]
        for call in (self._sum, self._send, self._gather):
            call.restype = None

    @property
    def exchanges(self) -> tuple[int, int]:
        """Addresses of the functions by which compiled code sums over ranks and gathers columns from ranks."""
        sums, gathers = (ctypes.cast(call, c_void_p).value or 0 for call in (self._sum, self._gather))
        return sums, gathers

    def sum(self, exchange: CExchange, numbers: Tensor) -> None:
        """All-reduce: replace contiguous float32 numbers by their sums over the ranks of an exchange."""
        self._sum(exchange, numbers.data_ptr(), numbers.numel())

    def send(self, exchange: CExchange, data: Tensor) -> None:
        """Broadcast the contiguous bytes of rank 0 to all ranks."""
        self._send(exchange, data.data_ptr(), data.nbytes)

    def gather(self, exchange: CExchange, own: Tensor, begins: Sequence[int], *, everywhere: bool) -> Tensor:
        """Gather the columns of all ranks: [R, begins[-1]] float32 on rank 0 or, with `everywhere`, on all ranks.

        Args:
            own: [R, begins[rank + 1] - begins[rank]] float32, contiguous.
            begins: [ranks + 1] first column of each rank, and the number of columns.
        """
        wanted = everywhere or exchange.rank == 0
        found = torch.empty((own.shape[0], begins[-1]) if wanted else (0, 0))
        columns, address = (c_int64 * len(begins))(*begins), found.data_ptr() if wanted else None
        self._gather(exchange, own.data_ptr(), columns, own.shape[0], begins[-1], address)
        return found

    def pack(self, rows: Tensor, target: Tensor, first: int, outputs: int, turn: int) -> bool:
        """Write rows of a weight into its tiles; return False if a number is not finite and `turn` checks for it.

        Args:
            rows: [R, n], each row contiguous.
            target: [tiles, units, 16, ...] contiguous.
            first: output (row of the whole weight) of `rows[0]`.
            outputs: outputs of the weight; the padding of its last tile becomes zero.
        """
        row_bytes, unit = rows.shape[1] * rows.itemsize, target[0, 0, 0].numel() * target.itemsize
        packing = Packing(
            rows.data_ptr(), rows.shape[0], row_bytes, rows.stride(0) * rows.itemsize, target.data_ptr(), first,
            outputs, target.shape[1],
        )  # fmt: skip
        status = self._pack(packing, unit, turn, threads_for(rows.shape[0] * row_bytes))
        _check(min(status, 0))
        return bool(status == 0)

    def round_int4(self, weight: Tensor, group: int, factors: Sequence[float], data: Tensor, scale: Tensor) -> None:
        """Round a weight to values -8 .. 7 with the scale of least squared error for each group of inputs.

        Args:
            weight: [out, in] bfloat16, finite numbers, each row contiguous.
            group: inputs that share a scale, 32 or 128.
            factors: tried scales, relative to the one that maps a group's greatest weight to -8.
            data: [tiles, units, 16, 4] uint8, filled with the values as linear.h has them; 8 inputs are a unit.
            scale: [tiles, units * 8 / group, 16] bfloat16, filled.
        """
        tried = (c_float * len(factors))(*factors)
        rounding = Int4Rounding(
            weight.data_ptr(), weight.shape[0], weight.shape[1], weight.stride(0), data.shape[1], group, len(factors),
            ctypes.addressof(tried), data.data_ptr(), scale.data_ptr(),
        )  # fmt: skip
        _check(self._round_int4(rounding, threads_for(weight.nbytes)))

    def awq_codes(self, words: Tensor) -> Tensor:
        """Codes [out, in / 2] uint8, an even input in the low four bits, from AWQ's words [in, out / 8] int32."""
        inputs, columns = words.shape
        codes = lent_memory((8 * columns, inputs // 2), torch.uint8)
        words = words.contiguous()
        _check(self._awq(words.data_ptr(), inputs, columns, codes.data_ptr(), threads_for(words.nbytes)))
        return codes

    def read_blocks(self, kind: str, blocks: Tensor, sizes: Sequence[int]) -> list[Tensor]:
        """Codes, scales, offsets, steps and offset steps of llama.cpp's blocks [out, blocks, bytes].

        Args:
            sizes: bytes of each of these per block.

        Returns:
            uint8 [out, blocks * size] for each size.
        """
        blocks, (outputs, count, _) = blocks.contiguous(), blocks.shape
        found = [lent_memory((outputs, count * size), torch.uint8) for size in sizes]
        parts = (c_void_p * len(found))(*(part.data_ptr() for part in found))
        number = BLOCK_KINDS.index(kind)
        _check(self._blocks(number, blocks.data_ptr(), outputs * count, parts, threads_for(blocks.nbytes)))
        return found

    def read_entries(self, book: Tensor, entries: Tensor, signs: Tensor | None, rows: Tensor | None) -> Tensor:
        """Numbers int8 [n * 8] of codebook entries.

        Args:
            book: int8 [N, 4 or 8] codebook.
            entries: int32, contiguous, indices into `book`.
            signs: int8 [R, 8] factors of eight numbers; None for no signs.
            rows: int32 [n] indices into `signs`.
        """
        width = book.shape[1]
        count = entries.numel() * width // 8
        found = lent_memory((count * 8,), torch.int8)
        pointers = [None if each is None else each.data_ptr() for each in (entries, signs, rows)]
        _check(self._entries(book.data_ptr(), width, *pointers, count, found.data_ptr(), threads_for(found.nbytes)))
        return found

    def join_bits(self, codes: Tensor, bits: int) -> Tensor:
        """Pack codes [out, in], contiguous bytes below 2 ** bits, to uint8 [out, in * bits / 8]; see `formats.bits`."""
        found = lent_memory((codes.shape[0], codes.shape[1] * bits // 8), torch.uint8)
        _check(self._join(codes.data_ptr(), codes.numel() // 32, bits, found.data_ptr(), threads_for(codes.nbytes)))
        return found

    def numbers(self, rows: CodedRows) -> None:
        """Dequantise rows of codes into the memory to which `rows` points."""
        _check(self._numbers(rows, threads_for(rows.rows * rows.row_bytes)))

    def rows(self, packed: PackedWeight, index: Tensor) -> Tensor:
        """Rows `index` [R] int64 of a weight in bfloat16 or blocks: [R, in] bfloat16; the caller checks the range."""
        index = index.contiguous()
        found = torch.empty(len(index), packed.weight.inputs, dtype=torch.bfloat16)
        _check(self._rows(packed.weight, index.data_ptr(), len(index), found.data_ptr()))
        return found

    def is_finite(self, codes: Tensor) -> bool:
        """True if contiguous float8_e4m3fn codes contain no NaN."""
        status = self._check_fp8(codes.data_ptr(), codes.nbytes, threads_for(codes.nbytes))
        _check(min(status, 0))
        return bool(status == 0)

    def linear(
        self,
        packed: PackedWeight,
        x: Tensor,
        dtype: torch.dtype,
        norm: tuple[Tensor, float, float] | None = None,
        outputs: range | None = None,
    ) -> Tensor:
        """Compute norm(x) W^T + bias.

        Args:
            x: [M, in] bfloat16.
            dtype: dtype of the result, bfloat16 or float32.
            norm: weight [in], epsilon and shift of an RMS norm of x, None for no norm.
            outputs: range of outputs to compute, from a multiple of 16 on; None for all.
        """
        x, outputs = x.contiguous(), outputs or range(packed.weight.outputs)
        y = torch.empty(x.shape[0], len(outputs), dtype=dtype)
        weight, eps, shift = (None, 0.0, 0.0) if norm is None else (norm[0].data_ptr(), *norm[1:])
        wide, threads = dtype == torch.float32, threads_for(packed.nbytes)
        _check(
            self._linear(
                packed.weight, x.data_ptr(), x.shape[0], weight, eps, shift, outputs.start, outputs.stop, y.data_ptr(),
                wide, threads,
            )
        )  # fmt: skip
        return y

    def fuse(self, model: Model, features: Tensor, nbytes: int) -> Tensor:
        """Hidden states [T, H] from features [T, W] bfloat16, for an EAGLE-3 head."""
        features = features.contiguous()
        x = torch.empty(features.shape[0], model.hidden, dtype=torch.bfloat16)
        _check(self._fuse(model, features.data_ptr(), features.shape[0], x.data_ptr(), threads_for(nbytes)))
        return x

    def forward(
        self,
        model: Model,
        pages: Pages,
        spans: Sequence[CSpan],
        tokens: Tensor,
        x: Tensor,
        taps: Sequence[Tensor | None],
        nbytes: int,
    ) -> None:
        """Run all blocks of a decoder or head.

        Args:
            tokens: [T] int64, padding negative.
            x: [T, H] bfloat16, overwritten with the output of the last block; input of a model with `join`.
            taps: one per layer: [T, H] bfloat16 that receives the layer's output, or None.
            nbytes: size of all weights, from which the number of threads is chosen.
        """
        pointers = (c_void_p * len(taps))(*(None if tap is None else tap.data_ptr() for tap in taps))
        listed = (CSpan * len(spans))(*spans)
        count, threads = tokens.shape[0], threads_for(nbytes)
        _check(
            self._forward(model, pages, listed, len(spans), tokens.data_ptr(), count, x.data_ptr(), pointers, threads)
        )

    def guess(
        self,
        model: Model,
        pages: Pages,
        feed: Feed,
        output: Output,
        draw: Draw,
        worth: CWorth | None,
        levels: int,
        nbytes: tuple[int, int],
    ) -> tuple[Tensor, Tensor]:
        """Draft a chain after each row's last committed token; return tokens and shares [B, levels, K] float32.

        The share of a candidate in its draw is its p / E over the sum of p / E of all tokens (E = 1 for greedy rows).

        Args:
            feed: committed tokens that rows read first.
            draw: sampling of the rows.
            worth: value of guesses, which ends rows one by one, and K, the candidates of a draw; None for K = 1.
            levels: tokens of a chain; the last one is not run through the model.
            nbytes: sizes of the blocks' weights and of the output head's.

        Returns:
            Tokens [B, 1 + levels] int64, the committed token first, or with `worth` [B, 1 + most]; and the shares.
        """
        width, ranks = (levels, 1) if worth is None else (worth.most, worth.ranks)
        guesses = torch.empty(feed.span.batch, 1 + width, dtype=torch.int64)
        shares, threads = torch.empty(feed.span.batch, levels, ranks), [threads_for(each) for each in nbytes]
        found = guesses.data_ptr(), shares.data_ptr()
        _check(self._guess(model, pages, feed, output, draw, worth, *found, levels, *threads))
        return guesses, shares

    def grow(
        self,
        model: Model,
        pages: Pages,
        feed: Feed,
        output: Output,
        draw: Draw,
        growth: Growth,
        nbytes: tuple[int, int],
    ) -> None:
        """Draft trees after each row's last committed token into the memory of `growth`; arguments as for `guess`."""
        _check(self._grow(model, pages, feed, output, draw, growth, *(threads_for(each) for each in nbytes)))

    def sample(self, draw: Draw, scores: Tensor) -> Tensor:
        """Draw the target's tokens [B, N] int64 from logits [B, N, V] float32; -2 where torch must draw, see sample.h.

        Args:
            draw: sampling of B rows, and the position of each of the B N draws.
        """
        scores = scores.contiguous()
        rows, nodes, size = scores.shape
        tokens = torch.empty(rows, nodes, dtype=torch.int64)
        threads = threads_for(scores.nbytes * (DRAW_WORK if draw.seeds else 1))
        _check(self._sample(draw, scores.data_ptr(), rows, nodes, size, tokens.data_ptr(), threads))
        return tokens


def _check(status: int) -> None:
    if status != 0:
        raise MemoryError("the compiled kernels ran out of memory for their workspace")
