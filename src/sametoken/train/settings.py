"""What a user can set about training: names of the field's launch scripts, checked at the edge, read somewhere each.

Nothing here needs torch, so that a wrong option is refused before anything is loaded.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from sametoken.checkpoint.paths import user_path
from sametoken.config import MOST_THREADS, Positive, Settings
from sametoken.errors import ConfigError
from sametoken.files import json_object

MODES = ("eagle3", "eagle", "eagle1", "medusa", "draft")
ALIASES = {"eagle": "eagle3"}  # a mode that names a family, and the member it stands for

# Settings of the architecture, and the modes that read them.
ONLY_FOR = {
    **dict.fromkeys(("taps", "norm_before_residual", "norm_before_fc", "fc_norm", "norm_output"), ("eagle3",)),
    **dict.fromkeys(("eagle_num_layers", "eagle_config", "draft_window"), ("eagle3", "eagle1")),
    **dict.fromkeys(("medusa_num_heads", "medusa_num_layers", "medusa_own_heads"), ("medusa",)),
    "fc_bias": ("eagle1",),
    "draft_config": ("draft",),
}
# The same of the loss.
LOSS_ONLY_FOR = {
    **dict.fromkeys(("feature_weight", "guess_weight", "noise"), ("eagle1",)),
    "ttt_steps": ("eagle3", "eagle1"),
    "on_policy": ("draft",),
}

ROW = 512  # tokens of a row where nothing else is said
LONGEST = 2048  # tokens that conversations are cut at where nothing else is said

Mode = Literal["eagle3", "eagle", "eagle1", "medusa", "draft"]
Schedule = Literal["cosine", "linear", "constant"]
Share = Annotated[float, Field(ge=0, le=1)]
Blocks = Annotated[int, Field(ge=1, le=128)]


class HeadSettings(Settings):
    """The head to train.

    Attributes:
        mode: eagle3, eagle1 (which is EAGLE-2 too: one head, another tree) or medusa; eagle stands for eagle3; draft
            is a small model of its own.
        taps: eagle3: blocks of the target, from 0, whose outputs it reads, as 1,7,12; None is 1, n // 2 - 1 and n - 4.
        eagle_num_layers: blocks of an EAGLE head.
        eagle_config: JSON file with the head's architecture in the names of config.json; its keys win.
        medusa_num_heads: tokens that Medusa heads guess.
        medusa_num_layers: residual blocks of each Medusa head.
        medusa_own_heads: every Medusa head has an output layer; otherwise all use the target's.
        draft_window: tokens that an EAGLE head attends to; None is all.
        norm_before_residual: eagle3: the residual starts from the normed hidden state; SGLang and TensorRT-LLM do not.
        norm_before_fc: eagle3: one norm over all taps before they are fused.
        fc_norm: EAGLE 3.1: a norm for each tap; None is yes for a new eagle3 head without norm_before_fc.
        norm_output: EAGLE 3.1: the next step reads the normed output; None is yes for a new eagle3 head.
        fc_bias: eagle1: the fusion has a bias.
        draft_config: draft: JSON file with the model's sizes in the names of a Llama's config.json.
        init_from: directory of a head, or with draft of a model, to start from; its architecture is kept.
    """

    mode: Mode = "eagle3"
    taps: str | None = None
    eagle_num_layers: Blocks = 1
    eagle_config: str | None = None
    medusa_num_heads: Blocks = 2
    medusa_num_layers: Annotated[int, Field(ge=0, le=128)] = 1
    medusa_own_heads: bool = True
    draft_window: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool | None = None
    norm_output: bool | None = None
    fc_bias: bool = False
    draft_config: str | None = None
    init_from: str | None = None

    @model_validator(mode="after")
    def _read_in_this_mode(self) -> HeadSettings:
        given = [name for name in ONLY_FOR if getattr(self, name) != type(self).model_fields[name].default]
        for name in given:
            if self.method not in ONLY_FOR[name]:
                raise ValueError(f"{name} is for mode {' or '.join(ONLY_FOR[name])}; leave it out for {self.mode}")
            if self.init_from is not None and name not in ("taps", "medusa_num_heads"):  # compared with the head's
                raise ValueError(f"init_from keeps its architecture; leave {name} out")
        return self

    @property
    def method(self) -> str:
        """The mode without aliases."""
        return ALIASES.get(self.mode, self.mode)

    @property
    def eagle(self) -> bool:
        return self.method in ("eagle3", "eagle1")


class LossSettings(Settings):
    """What is minimised.

    Attributes:
        ttt_steps: steps that an EAGLE head is unrolled for in training; None is 3 for eagle3 and 1 for eagle1.
        loss_decay: weight of each further step or head, relative to the one before; None is 1 for eagle3, else 0.8.
        loss: kl (soft labels), tv (total variation), lk (a mix that aims at acceptance) or hard (the data's tokens).
        loss_mix: lk: adaptive (KL gives way as acceptance grows), alpha (-log of the acceptance) or KL's share, 0 to 1.
        loss_mean: document counts every document the same, token every token.
        skip_outside: leave out places whose best token is outside the draft vocabulary.
        feature_weight: eagle1: of SmoothL1 on hidden states.
        guess_weight: eagle1: of the loss of guesses.
        noise: eagle1: width of uniform noise on the features that it reads; less in documents of over 512 tokens.
        on_policy: draft: share of the documents whose last answer the draft writes itself, for the target to judge.
    """

    ttt_steps: Annotated[int, Field(ge=1, le=32)] | None = None
    loss_decay: Annotated[float, Field(gt=0, le=1)] | None = None
    loss: Literal["kl", "tv", "lk", "hard"] = "kl"
    loss_mix: str = "adaptive"
    loss_mean: Literal["document", "token"] = "document"
    skip_outside: bool = True
    feature_weight: Annotated[float, Field(ge=0)] = 1.0
    guess_weight: Annotated[float, Field(ge=0)] = 0.1
    noise: Annotated[float, Field(ge=0)] = 0.2
    on_policy: Share = 0.0

    @model_validator(mode="after")
    def _mixable(self) -> LossSettings:
        if self.mix not in ("adaptive", "alpha") and not (isinstance(self.mix, float) and 0 <= self.mix <= 1):
            raise ValueError(f"loss_mix {self.loss_mix!r}: expected adaptive, alpha or a number from 0 to 1")
        return self

    @property
    def decay(self) -> float:
        """`loss_decay`, or what it is where nothing chose it."""
        return 0.8 if self.loss_decay is None else self.loss_decay

    @property
    def mix(self) -> str | float:
        """`loss_mix` as a number where it is one."""
        try:
            return float(self.loss_mix)
        except ValueError:
            return self.loss_mix


class RunSettings(Settings):
    """How training runs.

    Attributes:
        num_epochs: passes over all of the data; None is as many as make 600 steps, 1 to 20, or max_steps.
        max_steps: end after so many steps of the optimiser; None is all epochs.
        lr: highest learning rate of the run; None is 5e-3 for muon and 1e-3 for adamw, less for targets wider than 256.
        optim: muon for the matrices inside the head and adamw for the rest, which gets further in few steps, or adamw
            alone; None is muon, or adamw with fsdp and where lr is given.
        lr_scheduler_type: cosine, linear or constant after the warm-up.
        warmup_ratio: share of the steps over which the rate rises.
        warmup_steps: their number; None is by the ratio.
        train_bs: rows of one forward, see training_seq_len; None is 1, and more where there would be over 8000 steps.
        training_seq_len: tokens that documents are packed into per row, and cut at where they are not prepared; None is
            512, documents are cut at 2048, and one of more than 512 is a row of its own.
        gradient_accumulation_steps: forwards of a step of the optimiser; None is by train_bs.
        weight_decay: of matrices, for every step.
        max_grad_norm: the norm that gradients are clipped to.
        seed: of the first weights, the order of the data and the noise.
        dtype: what is computed in; weights and their updates are float32 always.
        gradient_checkpointing: keep less for the gradient and compute it again.
        num_gpu: processes that share each step, one per GPU or core.
        fsdp: shard weights and optimiser among the processes.
        fsdp_transformer_layer_cls_to_wrap: with fsdp, blocks that other trainers shard one by one; a head is sharded
            whole, which is said.
        device: where to compute: auto, cpu or cuda.
        threads: threads that compute in each process; None is one per core, shared among the processes.
    """

    num_epochs: Annotated[float, Field(gt=0)] | None = None
    max_steps: Positive | None = None
    lr: Annotated[float, Field(gt=0)] | None = None
    optim: Literal["adamw", "muon"] | None = None
    lr_scheduler_type: Schedule = "cosine"
    warmup_ratio: Share = 0.04
    warmup_steps: Annotated[int, Field(ge=0)] | None = None
    train_bs: Positive | None = None
    training_seq_len: Annotated[int, Field(ge=8)] | None = None
    gradient_accumulation_steps: Positive | None = None
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    max_grad_norm: Annotated[float, Field(gt=0)] = 0.5
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    gradient_checkpointing: bool = False
    num_gpu: Annotated[int, Field(ge=1, le=MOST_THREADS)] = 1
    fsdp: bool = False
    fsdp_transformer_layer_cls_to_wrap: str | None = None
    device: Literal["auto", "cpu", "cuda"] = "auto"
    threads: Annotated[int, Field(ge=1, le=MOST_THREADS)] | None = None

    @model_validator(mode="after")
    def _whole_matrices(self) -> RunSettings:
        if self.fsdp and self.optim == "muon":
            raise ValueError("optim muon needs whole matrices and fsdp shards them; leave one of them out")
        return self


class KeepSettings(Settings):
    """What is written, and when the head is judged.

    Attributes:
        output_dir: checkpoints, log, curves, and the best head in `head`.
        save_steps: steps between two checkpoints, others at judgements and signals; None is an eighth of the run, at
            most 500.
        save_total_limit: checkpoints that are kept.
        resume: go on from the last whole checkpoint of output_dir, if there is one.
        logging_steps: steps between lines of the log.
        eval_data: file of conversations on whose prompts the head is judged; None judges nothing.
        eval_steps: steps between two judgements; None is an eighth of the run, at most 500.
        eval_prompts: prompts of a judgement, the first that fit.
        eval_tokens: tokens of each judged answer, at most.
        max_draft_len: longest draft when a head is judged.
        patience: judgements without a better one after which training ends; None never ends early.
        do_eval: judge after the last step too.
    """

    output_dir: str = "sametoken-head"
    save_steps: Positive | None = None
    save_total_limit: Positive = 2
    resume: bool = True
    logging_steps: Positive = 10
    eval_data: str | None = None
    eval_steps: Positive | None = None
    eval_prompts: Positive = 80
    eval_tokens: Positive = 64
    max_draft_len: Annotated[int, Field(ge=1, le=128)] = 5
    patience: Positive | None = None
    do_eval: bool = True


class DataSettings(Settings):
    """What it is trained on; all but `data` for files of conversations, prepared data have their own.

    Attributes:
        data: file of conversations, or a directory that `sametoken prepare` made.
        draft_vocab_size: eagle3: tokens that the head can guess; None is all of the target's.
        fill_vocabulary: fill the draft vocabulary up with tokens that do not occur.
        all_tokens: every token counts, not only what the assistant says.
        end_of_turn: the token that ends an answer counts too.
    """

    data: str | None = None
    draft_vocab_size: Positive | None = None
    fill_vocabulary: bool = False
    all_tokens: bool = False
    end_of_turn: bool = True


GROUPS: tuple[type[Settings], ...] = (HeadSettings, LossSettings, RunSettings, KeepSettings, DataSettings)


def read_keys(option: str, file: str | None) -> dict[str, Any]:
    """The JSON object in a file that an option names, an empty one for no file.

    Raises:
        ConfigError: there is no such file, or it holds something else.
    """
    if file is None:
        return {}
    try:
        return json_object(user_path(file))
    except OSError as error:
        raise ConfigError(f"{option} {file}: {error.strerror}; expected a JSON file") from error
    except ValueError as error:
        raise ConfigError(f"{option} {file} {error}; write an object of keys and values") from error
