"""Blocks of llama.cpp of less than four bits: values from codebooks with signs, and ternary values.

Each function converts blocks, uint8 [out, blocks, bytes], to integers int8 [out, blocks, n] and their scales: a float32
number per group, or bytes and the step of a block. Products are exact. Source: ggml's ggml-quants.c and ggml-common.h,
from which the codebooks `BOOKS` are taken (MIT licence, the ggml authors).
"""

from __future__ import annotations

import base64
import zlib
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from sametoken.kernels.cpu.variant import library

# Values of the digits of a book; those of IQ1 in eighths.
VALUES = {
    "IQ1_S": (-8, 0, 8), **dict.fromkeys(("IQ2_XXS", "IQ2_XS", "IQ2_S"), (8, 25, 43)),
    "IQ3_XXS": (4, 12, 20, 28, 36, 44, 52, 62), "IQ3_S": (1, 3, 5, 7, 9, 11, 13, 15),
}  # fmt: skip
SEVEN_SIGNS = ("IQ2_XXS", "IQ2_XS", "IQ3_XXS")
IQ1_ENTRIES = 2048
# Entries of a book as ascending numbers, whose digits, the lowest first, are indices of VALUES. A bit for each number
# marks the entries; the bits are compressed and in base 85.
BOOKS = {
    "IQ1_S": (
        "c-k#eK}(!R7=CxE;dM-9V?RN1diSfb(^(PgE$L;EU0C#DLh=VZ*|bQ>IZZw%yXlwN6ha`hG?#HO$v6$G@ldv(umMk2dT8mb2WdTox*h^v8Vt"
        "nDuD#8?@Vw9Syw7v(LR2?w<}y}3b9YJG^C&5*&qs>Nl?x;NhAB!%0hRecnsm$a2YwJ@;QqccSPG~@n#@N5uBY$^gNY22s7}?HYgoxmY#Y+!A"
        "jh1yxWA4l1OzVO1-XRyWBes^wA;LAoBq<x!%nuPhFWp9`{&R@7DG%<XIwD^Is3Q$Jf@<B<<hd(0^?jzIHG8vQn*?-$Ub(LsHW&@kYNcQ%|}d"
        "P%c;av8KJU^mWiJv*28-WD<$YEG%#}+D!ES;XeDuFD(VlG#i@A4$V;H%7rH52w&LB_pg1xSvl=L<CZ@9?{WdkSxbxSuMq|l64F4MqT|O(RS}"
        "O@H(bLXvHn!_OntvSw2GXTKiD_6XGLxujp0!)qyF+V=7Bv?g3oFy??D1-6?{(2le%HQrc>Le(m#@Cb_P%)g$;r#{<KcsUbe#9?p_<1{H>jE?"
        "+1SCIq;Fwj@yPMjA_U90?}vdY$)D1%>fQq-z{36HBT$I&mG*v%J#A~V%aSj@pZtCEAg}V1eou`2@uUxU_YQ=)6;l3U7EjmAKr#y2F0kdO91c"
        "}@u6ikZ68>90+)KINV7E3oVy0wcNC7Qg*Gnz$6Ckekcj5w;yQl$8BcV}uIeIA*;9XR~L2uzcrHYS+2)y-rqrtcg6e{stpn$cM#il(dTBx(R&"
        "0u-;P1DmAvG}u@dX;b%ns9v~6p49X^c}lqEMlIFjzJBbrp$X4T{{D_p5YV7e^~xM<^E7<_56qcAaL=FI+lT|4v2#Y&dpW2-Egd@Fdf5G@Dhe"
        "eu*|v(bMFD;1sQ1"
    ),
    "IQ2_XXS": (
        "c-nPRORB^$43oj#tB`je2YP^R=KfcCw)5@K5e=lV<VbEmf91ogR%p3E0BR^O#16P=^@J3)+t0mx___f>P^zDolEn6;is&dxI!#Zg_{KuzkVd"
        "4Mw`?l*l~*(z5~c8Qj-!-YZym34v`$TQ4<4*~)dpL;rq|+W4irx`d$&)6^vGb7UkLBrzcFbHqcf>sMFwRxr;MTG;*}m%Qlby-@@TSk)X7om@"
        "@#uKQIjUUWQ&$2&y}*gX5TV=Bc|Cuh1wL(2Kn3A3Yj<N%;gblzhT7_jxp@MF=lA5st5R^Hl2J=^JV`E{Z0D^#$6R7"
    ),
    "IQ2_XS": (
        "c-mc2TdsvL2pkgnkBRPwCicH3cK=&BJX-bM<{ZTW!^|+oxJIi-qkD|rsuaR~iB<*?x~C4>8J0pJW<V>X*vo#SY&(-c)w(<-fCU6QVt|)*=>o"
        "J=N8h~B3mmYKBw*Y)Ca<s*uvOak7T*la5<g=kAh?T96(5+bR(Mt@J=L5^n!u1sF+~=p=RjVCGbM+vDH*59tF!>kC`)-u3GzO}jM8X_r-*1yt"
        "ubG*&a^iqGs?p-do}D8x2NWXU?%O)=7t88q040RdJ=Ak)9T+$YBcFD31^6BC_W+mG1}iEA-T}Oj@u6-pQ1yByIl9%`W3mW#F%j~<yh(N0zSL"
        "~oH^Zy%}}tQx4=M73#xoc?jNErTmD?iDs40;(&MG>YYMNuDE=SK;cc#9vM%q_=>7msuqjC"
    ),
    "IQ2_S": (
        "c-n1JU5W-F3~NE(E9iYHjPDBe{#V(wI=kPpE5rQ7#3X8F%Z9aF@G^(h-0EI3Em0|W3^QwctZ7zp0a8G#rYWS&oF&YfEj@sgh^u5FBBgC>LAk"
        "BEEtarKv-X}c)kMD5E9g)N*35uFS6j&;COQ!QC2=T0oAzp}=fs8f?3xctXeG?g^dQAA!2(KVP=j1x!<Qgx@l7F)Pu!TMd$m>{ZzEray(N$Az"
        "Rb24)#*U9zYZZF^+2!@EVQ9?ARiEH!J<ErE8usn4?()-BQhW*1pE<<S|Z6aT82aQO}QP4+el6zUY~*z7~Sl6pK?p!Q_DMIhH4w7?joIO9P^#"
        "Dw9CRS7mu8OBC|vDii4FoWN_zK9m?6y$}qXC*pyH_2f!)+bXep&HXz~CYasM7Fd3(JhmM~KIbkHJ7yU4;E692~{FNElHOf~Fzm+TBn!W(Jyj"
        "C6"
    ),
    "IQ3_XXS": (
        "c-l=-F%H5o3_M%0RAmZ7_lgPeigaLyA4Q!IuVCbv_?)J2Rn;aw-<^~BWtxCXwzFx0%xW)eST<YW5KL&L;j#hAAHoX-c)&}FY<X@1m|7IGsjr"
        "X>q7@bAuHrcP3L2_`6x)_>^v5;&o?@Fdagv_Uo9H*utGOGEJ93R6P|L2rgx{U}Y-UnrS3sKYtPIbF!WdDS7|dsT<9UQCqzhJe8+4kK5km%Xv"
        "Hjm=J(sMgqk-e3v^zjTJayVggoDWMJzTWE4a0T)3l-9P!ydlNePrBA?Xny*@kmBo4W|8$?wEo20v5Uy_5"
    ),
    "IQ3_S": (
        "c-k#d!AiqG5PdVu!e&pqA>uXNMyUCUt<-~hDT4SrX{pfmmf{D9Rs{Q#&TgE;z`Qr}-rMBob#A|%IbF{W(Id*&Lkwq!%0~0(%@Ao{OU0lD_x2"
        "OXCI^OquXIKLt}o^pYnG?L6&oz+9HeSVPSrN(A}t!YmF^Xmp*3Qy-5G8(e|b5Y-VC?q(AA>+32wuC)HmEXp@c1}PT|h83}iuXSwt^ePGkv?U"
        "+Lf3a_=1ov?9@{igP&9v4ypFswx3&TJZ@M2_=SuX>*z&qp%+CoXl)ge8!drA@5Agyn!FG+()?*sDei}n1QT95(J|p-wR7#Aht{0!Hx!aZfy;"
        "cl!bD4D3uqR(zW`GY5;6>@R{_|3X$jRqNR^eu)^e<Ll^vCYlKPU1;QQ+o$IB(hKom+bHx0SXmXXwyZnVo8~6jd#wQ>"
    ),
}  # fmt: skip


class Numbers(NamedTuple):
    """Values and scales of blocks.

    Attributes:
        values: int8 [out, blocks, n].
        scale: [out, blocks, groups] float32, or int8 with `step`.
        step: [out, blocks, 2] the bytes of a float16.
    """

    values: Tensor
    scale: Tensor
    step: Tensor | None = None


@cache
def _book(name: str) -> Tensor:
    """Codebook int8 [entries, width]; IQ1 has each entry twice, with an eighth added and with an eighth subtracted."""
    values, width = VALUES[name], 4 if name.startswith("IQ3") else 8
    packed = torch.frombuffer(bytearray(zlib.decompress(base64.b85decode(BOOKS[name]))), dtype=torch.uint8)
    bits = packed.unsqueeze(1) >> torch.arange(8, dtype=torch.uint8, device="cpu") & 1
    entries = bits.flatten().nonzero().flatten()
    digits = entries.unsqueeze(1) // len(values) ** torch.arange(width, device="cpu") % len(values)
    book = torch.tensor(values, dtype=torch.int8, device="cpu")[digits]
    return torch.cat([book + 1, book - 1]) if name == "IQ1_S" else book


@cache
def _signs(stated: int) -> Tensor:
    """Signs 1 and -1, int8 [2 ** stated, 8], a bit for each; after seven bits, the eighth makes their sum even."""
    codes = torch.arange(1 << stated, dtype=torch.int32, device="cpu").unsqueeze(1)
    bits = codes >> torch.arange(8, dtype=torch.int32, device="cpu") & 1
    if stated == 7:
        bits[:, 7] = bits.sum(1) % 2
    return (1 - 2 * bits).to(torch.int8)


def _spelled(name: str, entries: Tensor, rows: Tensor | None = None) -> Tensor:
    """Values int8 [out, blocks, n] of a book's entries, with the signs in rows [out, blocks, ...] of `_signs`."""
    book, signs = _book(name), None if rows is None else _signs(7 if name in SEVEN_SIGNS else 8)
    compiled = None if entries.is_meta else library()
    if compiled is not None:
        rows = None if rows is None else rows.to(torch.int32).contiguous()
        found = compiled.read_entries(book, entries.to(torch.int32).contiguous(), signs, rows)
        return found.view(*entries.shape[:2], -1)
    found = book.to(entries.device)[entries.to(torch.int32)].reshape(*entries.shape[:2], -1)
    if signs is None or rows is None:
        return found
    return found * signs.to(rows.device)[rows.to(torch.int32)].view(found.shape)


def _shifted(numbers: Tensor, shifts: tuple[int, ...], mask: int) -> Tensor:
    """Bits of integers [..., n] from each shift on, [..., n * shifts]."""
    by = torch.tensor(shifts, dtype=numbers.dtype, device=numbers.device)
    return (numbers.unsqueeze(-1) >> by & mask).flatten(-2)


def _float(data: Tensor) -> Tensor:
    """Float32 [..., 1] of the bytes of a float16."""
    return data.contiguous().view(torch.float16).to(torch.float32)


def _words(data: Tensor) -> Tensor:
    """Int32 [..., n / 2] of the bytes of unsigned 16-bit integers."""
    return data.contiguous().view(torch.int16).to(torch.int32) & 0xFFFF


def _odd(step: Tensor, scale: Tensor, parts: int) -> Tensor:
    """Float32: step (2 scale + 1) / parts."""
    return step * (2 * scale + 1).to(torch.float32) / parts


def iq2_xxs(blocks: Tensor) -> Numbers:
    """32 numbers in eight bytes: four entries, then four times seven signs and a scale."""
    quads = blocks[:, :, 2:].reshape(*blocks.shape[:2], 8, 8)
    word = quads[..., 4:].contiguous().view(torch.int32).squeeze(-1)
    return _sevens("IQ2_XXS", quads[..., :4], word, _odd(_float(blocks[:, :, :2]), word >> 28 & 15, 8))


def iq3_xxs(blocks: Tensor) -> Numbers:
    """Entries of four numbers, then for 32 numbers four times seven signs and a scale."""
    word = blocks[:, :, 66:].contiguous().view(torch.int32)
    return _sevens("IQ3_XXS", blocks[:, :, 2:66], word, _odd(_float(blocks[:, :, :2]), word >> 28 & 15, 4))


def _sevens(name: str, entries: Tensor, word: Tensor, scale: Tensor) -> Numbers:
    """Numbers with the signs of words [out, blocks, 8]."""
    return Numbers(_spelled(name, entries, _shifted(word, (0, 7, 14, 21), 127)), scale)


def iq2_xs(blocks: Tensor) -> Numbers:
    """Words of an entry's nine bits and seven signs, then scales of 16 numbers."""
    word, scale = _words(blocks[:, :, 2:66]), _shifted(blocks[:, :, 66:], (0, 4), 15)
    return Numbers(_spelled("IQ2_XS", word & 511, word >> 9), _odd(_float(blocks[:, :, :2]), scale, 8))


def iq2_s(blocks: Tensor) -> Numbers:
    """Entries, signs, two upper bits of each entry, scales of 16 numbers."""
    entry = blocks[:, :, 2:34].to(torch.int32) | _shifted(blocks[:, :, 66:74], (0, 2, 4, 6), 3).to(torch.int32) << 8
    scale = _odd(_float(blocks[:, :, :2]), _shifted(blocks[:, :, 74:], (0, 4), 15), 8)
    return Numbers(_spelled("IQ2_S", entry, blocks[:, :, 34:66]), scale)


def iq3_s(blocks: Tensor) -> Numbers:
    """Entries of four numbers, an upper bit of each, signs, scales of 32 numbers."""
    upper = _shifted(blocks[:, :, 66:74], tuple(range(8)), 1).to(torch.int32) << 8
    entry, scale = blocks[:, :, 2:66].to(torch.int32) | upper, _shifted(blocks[:, :, 106:], (0, 4), 15) * 2 + 1
    return Numbers(_spelled("IQ3_S", entry, blocks[:, :, 74:106]), scale.view(torch.int8), blocks[:, :, :2])


def iq1_s(blocks: Tensor) -> Numbers:
    """Entries, then words of their upper bits, a scale, and the sign of an eighth that is added to 32 numbers."""
    word = _words(blocks[:, :, 34:])
    entry = blocks[:, :, 2:34].to(torch.int32) | _shifted(word, (0, 3, 6, 9), 7) << 8
    entry = entry + (word >> 15).repeat_interleave(4, 2) * IQ1_ENTRIES
    return Numbers(_spelled("IQ1_S", entry), _odd(_float(blocks[:, :, :2]), word >> 12 & 7, 8))


def iq1_m(blocks: Tensor) -> Numbers:
    """Entries, their upper bits with the sign of an eighth that is added to 8 numbers, scales and parts of the step."""
    word = _words(blocks[:, :, 48:])
    parts = [(word[:, :, i : i + 1] & 0xF000) >> 12 - 4 * i for i in range(4)]
    step = (parts[0] | parts[1] | parts[2] | parts[3]).to(torch.int16).view(torch.float16).to(torch.float32)
    nibbles = _shifted(blocks[:, :, 32:48], (0, 4), 15).to(torch.int32)
    entry = (blocks[:, :, :32].to(torch.int32) | (nibbles & 7) << 8) + (nibbles >> 3) * IQ1_ENTRIES
    return Numbers(_spelled("IQ1_S", entry), _odd(step, _shifted(word, (0, 3, 6, 9), 7), 8))


def tq1_0(blocks: Tensor) -> Numbers:
    """Five numbers in a byte, as a fraction of 256 in base 3; four in each of the last four bytes."""
    powers = torch.tensor([1, 3, 9, 27, 81], dtype=torch.uint8, device=blocks.device).view(5, 1)
    parts = [blocks[:, :, :32], blocks[:, :, 32:48], blocks[:, :, 48:52]]
    digits = torch.cat([
        (part.unsqueeze(2) * powers[:count]).flatten(2) for part, count in zip(parts, (5, 5, 4), strict=True)
    ], 2)  # fmt: skip
    return _one_step((digits.to(torch.int16) * 3 >> 8).to(torch.int8) - 1, blocks[:, :, 52:])


def tq2_0(blocks: Tensor) -> Numbers:
    """Four numbers in a byte; 32 bytes hold four times 32."""
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8, device=blocks.device).view(4, 1)
    numbers = blocks[:, :, :64].reshape(*blocks.shape[:2], 2, 1, 32) >> shifts & 3
    return _one_step(numbers.flatten(2).to(torch.int8) - 1, blocks[:, :, 64:])


def _one_step(values: Tensor, step: Tensor) -> Numbers:
    return Numbers(values, torch.ones_like(values[:, :, :8]), step)
