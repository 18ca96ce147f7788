"""Options of training: those that all kinds of drafts share, the run, the files it writes, and the data.

Names are those of other trainers' launch scripts. A kind of draft declares its own options in subclasses of
`HeadOptions` and `LossOptions`.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from sametoken.options.declaration import Positive, Settings, Shown
from sametoken.options.engine import MOST_THREADS

ROW = 512  # default number of tokens of a row
LONGEST = 2048  # default number of tokens at which conversations are cut
# Model Optimizer's option of the opposite meaning, for `all_tokens`.
ANSWER_ONLY = ("--no-answer-only-loss/--answer-only-loss", "--no_answer_only_loss/--answer_only_loss")

Schedule = Literal["cosine", "linear", "constant"]
RoundedFormat = Literal["fp8", "int8", "int4", "nvfp4", "mxfp4"]  # of `sametoken quantize`, whose files are safetensors
GroupSize = Literal[32, 64, 128]
Share = Annotated[float, Field(ge=0, le=1)]


class HeadOptions(Settings):
    """Start of a draft of any kind."""

    init_from: str | None = None
    """directory of a draft of the same kind to start from; its architecture is kept."""


class LossOptions(Settings):
    """The loss that is minimised."""

    loss_decay: Annotated[float, Field(gt=0, le=1)] | None = None
    """weight of each further step or head, relative to the one before; without it: 0.8, or the default of the mode."""
    loss: Literal["kl", "tv", "lk", "hard"] = "kl"
    """what is minimised: kl (soft labels), tv (total variation), lk (a mix that aims at acceptance) or hard (the data's
    tokens)."""
    loss_mix: str = "adaptive"
    """for loss lk: adaptive (the share of kl falls as acceptance grows), alpha (-log of the acceptance), or the share
    of kl, 0 to 1."""
    loss_mean: Literal["document", "token"] = "document"
    """whether every document counts the same, or every token."""
    skip_outside: bool = True
    """leave out the places where the target's most probable token is outside the draft vocabulary."""

    @model_validator(mode="after")
    def _mixable(self) -> LossOptions:
        if self.mix not in ("adaptive", "alpha") and not (isinstance(self.mix, float) and 0 <= self.mix <= 1):
            raise ValueError(f"loss_mix {self.loss_mix!r}: expected adaptive, alpha or a number from 0 to 1")
        return self

    @property
    def decay(self) -> float:
        """`loss_decay`, or its default."""
        return 0.8 if self.loss_decay is None else self.loss_decay

    @property
    def mix(self) -> str | float:
        """`loss_mix` as a number, or as its name: "adaptive" or "alpha"."""
        try:
            return float(self.loss_mix)
        except ValueError:
            return self.loss_mix


class RoundedLoss(LossOptions):
    """Loss of heads that can be trained for a format with few bits."""

    quantize_aware: RoundedFormat | None = None
    """round linear layers to this format of `sametoken quantize` in every forward of training, and write the head in
    it; gradients pass the rounding unchanged. Without it: nothing is rounded."""
    quantize_group_size: GroupSize | None = None
    """for quantize_aware int4: inputs that share a scale; without it: 128."""

    @model_validator(mode="after")
    def _grouped(self) -> RoundedLoss:
        if self.quantize_group_size is not None and self.quantize_aware != "int4":
            raise ValueError("quantize_group_size is for quantize_aware int4; leave it out")
        return self


class RunSettings(Settings):
    """Course of training."""

    num_epochs: Annotated[float, Field(gt=0)] | None = None
    """number of passes over all of the data; without it: as many as make 600 steps, 1 to 20, or max_steps."""
    max_steps: Positive | None = None
    """number of steps of the optimiser after which training ends; without it: all epochs."""
    lr: Annotated[float, Field(gt=0)] | None = None
    """highest learning rate of the run; without it: 5e-3 for muon and 1e-3 for adamw, less for targets wider than
    256."""
    optim: Literal["adamw", "muon"] | None = None
    """the optimiser: with muon the matrices inside the head use Muon and the rest AdamW, and this learns more in few
    steps; with adamw all use AdamW. Without it: muon, or adamw where lr is given."""
    lr_scheduler_type: Schedule = "cosine"
    """how the learning rate falls after the warm-up: cosine, linear or constant."""
    warmup_ratio: Share = 0.04
    """share of the steps over which the learning rate rises."""
    warmup_steps: Annotated[int, Field(ge=0)] | None = None
    """number of steps over which the learning rate rises; without it: by warmup_ratio."""
    train_bs: Positive | None = None
    """number of rows of one forward, see training_seq_len; without it: 1, or more where there would be over 8000
    steps."""
    training_seq_len: Annotated[int, Field(ge=8)] | None = None
    """number of tokens of a row. Documents are packed into rows; documents that are not prepared are cut at this
    length. Without it: rows have 512 tokens, documents are cut at 2048, and one of more than 512 is a row of its
    own."""
    gradient_accumulation_steps: Positive | None = None
    """number of forwards in a step of the optimiser; without it: by train_bs."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """weight decay of matrices in every step."""
    max_grad_norm: Annotated[float, Field(gt=0)] = 0.5
    """norm that gradients are clipped to."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """seed of the first weights, the order of the data and the noise."""
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    """number format of the computation; weights and their updates are always float32."""
    gradient_checkpointing: bool = False
    """keep fewer activations for the gradient and compute them again, which saves memory."""
    num_gpu: Annotated[int, Field(ge=1, le=MOST_THREADS)] = 1
    """number of processes that share each step, one per GPU or core."""
    fsdp: bool = False
    """shard the draft's weights and its optimiser among the processes."""
    fsdp_target: bool = False
    """shard the target among the processes too (FSDP2); each process holds one whole block at a time."""
    fsdp_transformer_layer_cls_to_wrap: str | None = None
    """with fsdp: the block class that other trainers shard one by one; no effect here, because a head is sharded as one
    part."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """where to compute: auto, cpu or cuda."""
    threads: Annotated[int, Field(ge=1, le=MOST_THREADS)] | None = None
    """number of threads that compute in each process; without it: one per core, shared among the processes."""


class KeepSettings(Settings):
    """Files that are written, and evaluation of the draft."""

    output_dir: str = "sametoken-head"
    """directory for checkpoints, log and curves, and for the best head in `head`."""
    save_steps: Positive | None = None
    """number of steps between two checkpoints; evaluations and signals write further ones; without it: an eighth of the
    run, at most 500."""
    save_total_limit: Positive = 2
    """number of checkpoints that are kept."""
    resume: bool = True
    """go on from the last complete checkpoint in output_dir, if there is one."""
    logging_steps: Positive = 10
    """number of steps between two lines of the log."""
    eval_data: str | None = None
    """file of conversations on whose prompts the head is evaluated; without it: nothing is evaluated."""
    eval_steps: Positive | None = None
    """number of steps between two evaluations; without it: an eighth of the run, at most 500."""
    eval_prompts: Positive = 80
    """number of prompts of an evaluation: the first of the file that fit into the context."""
    eval_tokens: Positive = 64
    """number of tokens of each evaluated answer, at most."""
    max_draft_len: Annotated[int, Field(ge=1, le=128)] = 5
    """number of tokens of a draft, at most, when a head is evaluated."""
    patience: Positive | None = None
    """number of evaluations without an improvement after which training ends; without it: never."""
    do_eval: bool = True
    """evaluate after the last step too."""


class DataSettings(Settings):
    """The training data.

    All but `data` is for files of conversations; prepared data have their own.
    """

    data: str | None = None
    """file of conversations, or a directory that `sametoken prepare` made, or one of Model Optimizer's dumps (.pt)."""
    draft_vocab_size: Positive | None = None
    """for eagle3: number of tokens that the head can propose; without it: all of the target's."""
    fill_vocabulary: bool = False
    """fill the draft vocabulary up with tokens that do not occur in the data."""
    all_tokens: Annotated[bool, Shown(spellings=ANSWER_ONLY)] = False
    """train on every token, not only on the assistant's answers."""
    end_of_turn: bool = True
    """train on the token that ends an answer too."""
