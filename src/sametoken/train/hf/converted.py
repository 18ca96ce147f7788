"""Transformers models with a head in training, for use in place of the model, for example with `transformers.Trainer`.

`convert` changes the class of the model to a subclass of its own class. With labels, its forward runs the frozen model,
unrolls the head and returns the loss of the head; without labels, it is the model's own forward. Only the head trains.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from sametoken.checkpoint.paths import user_path
from sametoken.errors import CheckpointError, ConfigError, DataError
from sametoken.files import make_directory, read_object, write_json, write_tensors
from sametoken.heads.kind import Head
from sametoken.heads.modelopt import ModelOptSettings
from sametoken.heads.objective import HeadObjective
from sametoken.heads.read import read_head
from sametoken.learning.batch import Batch, guess_weights
from sametoken.learning.loss import AcceptanceMetrics
from sametoken.learning.modes import ALIASES, MODES, meaning
from sametoken.learning.objective import STD
from sametoken.learning.target import Features
from sametoken.model.config import ModelConfig
from sametoken.train.hf import base
from sametoken.train.hf.modelopt import read, read_vocabulary

PART = "sametoken"  # attribute of the model with the head in training
PREFIX = f"{PART}.head."
HEAD, MANIFEST, WEIGHTS = "head", "sametoken.json", "model.safetensors"
IGNORED = -100  # label of tokens that do not count, as in transformers
FORMAT = 1


class Outputs(dict[str, Any]):
    """Outputs of a forward, by key or by attribute.

    Keys:
        loss: scalar loss of the head.
        logits: [B, S, V] of the model; absent in training, where they are not used.
        accuracies: [K] share of correct guesses of each step, given that all earlier steps were correct.
        acceptance_length: scalar, expected tokens per forward for greedy chains of K guesses, bonus included.
    """

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"no output {name!r}; there are {', '.join(self)}") from None


class Conversion(NamedTuple):
    """Settings of the conversion and of saving.

    Attributes:
        mode, config: arguments of `convert`.
        chosen: settings that the arguments denote.
        target: configuration of the model.
        save_base: true if the model's own weights are saved too.
    """

    mode: str
    config: Mapping[str, Any]
    chosen: ModelOptSettings
    target: ModelConfig
    save_base: bool


class Converted(nn.Module):
    """Mixin of converted models, which precedes the model's own class."""

    sametoken: HeadObjective
    sametoken_plan: Conversion
    accepts_loss_kwargs = False  # the loss is the mean of one batch, as transformers.Trainer expects

    def forward(
        self, input_ids: Tensor | None = None, attention_mask: Tensor | None = None, labels: Tensor | None = None,
        **others: Any,
    ) -> Any:  # fmt: skip
        """Compute the loss of the head if there are labels, otherwise the model's own outputs.

        Args:
            input_ids: int64 [B, S].
            attention_mask: [B, S], 0 for padding, which may be on either side.
            labels: int64 [B, S] unshifted ids, or -100 for tokens that do not count.

        Raises:
            DataError: labels have another shape, are shifted, or differ from the tokens.
            ConfigError: another argument is given together with labels.
        """
        if labels is None:
            return super().forward(input_ids=input_ids, attention_mask=attention_mask, **others)
        if given := [name for name, value in others.items() if value is not None and name != "use_cache"]:
            raise ConfigError(f"got {given[0]} beside labels, expected input_ids and attention_mask alone")
        if input_ids is None:
            raise ConfigError("got labels without input_ids; a head is trained on tokens")
        return self._guess(input_ids, attention_mask, labels)

    def _guess(self, tokens: Tensor, attention_mask: Tensor | None, labels: Tensor) -> Outputs:
        objective, plan = self.sametoken, self.sametoken_plan
        features = base.read(self, tokens, attention_mask, objective.taps)
        real = torch.ones_like(tokens, dtype=torch.bool) if attention_mask is None else attention_mask.bool()
        batch = _batch(tokens, real, labels)
        if self.training and objective.draws:
            # From the random state that transformers.Trainer saves and restores; the sample of a document is not known.
            batch = batch._replace(seeds=torch.randint(2**63 - 1, (len(batch.lengths),)))
        objective.outer = base.outer_of(self, plan.target)
        objective.draft_ids = objective.draft_ids.to(tokens.device)
        objective.dtype = _computed_in(features.last)
        rule, taken = objective.settings, Features(features.taps[real], features.last[real])
        shares = guess_weights(batch, objective.steps, rule.decay, per_document=rule.loss_mean == "document")
        loss, report = objective(batch, taken, shares.weights / shares.total.clamp(min=1))
        outputs = Outputs(loss=loss)
        if not self.training:
            outputs["logits"] = self.get_output_embeddings()(features.last)  # type: ignore[operator]
        return Outputs(outputs, **(_figures(report) if plan.chosen.report else {}))

    def train(self, mode: bool = True) -> Converted:
        """Set the training mode of the head; the frozen model stays in evaluation mode, without dropout."""
        super().train(mode)
        for name, child in self.named_children():
            if name != PART:
                child.eval()
        return self

    def gradient_checkpointing_enable(self, *how: Any, **named: Any) -> None:
        """Recompute the head's activations for the gradient, one whole step at a time; all arguments are ignored."""
        self.sametoken.recompute = True

    def gradient_checkpointing_disable(self) -> None:
        """Keep the head's activations for the gradient."""
        self.sametoken.recompute = False

    # transformers 5 reads both names
    activation_checkpointing_enable = gradient_checkpointing_enable
    activation_checkpointing_disable = gradient_checkpointing_disable

    @property
    def is_gradient_checkpointing(self) -> bool:
        return self.sametoken.recompute

    def save_pretrained(
        self, save_directory: str | Path, is_main_process: bool = True, state_dict: Mapping[str, Tensor] | None = None,
        **others: Any,
    ) -> None:  # fmt: skip
        """Write the head, ready to serve, into `head` of a directory, and the state of training next to it.

        The state is model.safetensors, the trained weights by their names in this model, which `restore` and
        `transformers.Trainer` read. With `save_base` of `convert`, the model's own weights and its config.json are
        written too, so that the directory is a complete checkpoint of the model.

        Raises:
            CheckpointError: `head` contains other files, or the disk is full.
        """
        plan, place = self.sametoken_plan, user_path(save_directory)
        if others and not plan.save_base:
            raise ConfigError(f"{next(iter(others))} is for the model's own weights; convert with save_base=True")
        weights = self.state_dict() if state_dict is None else state_dict
        if plan.save_base:
            arguments = {"is_main_process": is_main_process, "state_dict": dict(weights), **others}
            super().save_pretrained(place, **arguments)  # type: ignore[misc]
        if not is_main_process:
            return
        try:
            make_directory(place)
            head = {name: value.contiguous().cpu() for name, value in weights.items() if name.startswith(PREFIX)}
            bare = {name.removeprefix(f"{PART}."): value for name, value in head.items()}
            self.sametoken.write(place / HEAD, bare, getattr(torch, self.sametoken.head.config.dtype))
            if not plan.save_base:
                write_tensors(place / WEIGHTS, head)
            content = {"format": FORMAT, "mode": plan.mode, "config": dict(plan.config), "save_base": plan.save_base}
            write_json(place / MANIFEST, content)
        except DataError as error:
            raise CheckpointError(str(error)) from error

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load the weights of a whole model, or of its head alone, as `save_pretrained` writes them.

        Raises:
            CheckpointError: the weights belong to a head of another architecture.
        """
        given = {name for name in state_dict if name.startswith(PREFIX)}
        expected = {name for name in self.state_dict() if name.startswith(PREFIX)}
        if given != expected:
            name = min(given ^ expected)
            raise CheckpointError(
                f"the checkpoint's head has {len(given)} tensors, expected {len(expected)}, first that differs: "
                f"{name}; convert with the mode and configuration that it was trained with"
            )
        alone = len(given) == len(state_dict)
        found = super().load_state_dict(state_dict, strict=strict and not alone, assign=assign)
        if alone:
            found.missing_keys[:] = []  # the model itself is unchanged
        return found


def convert(model: Any, modes: Sequence[tuple[str, Mapping[str, Any]]], *, save_base: bool = False) -> Any:
    """Attach a head to a transformers model for training, in place; the model itself is frozen.

    Args:
        model: causal language model of a supported architecture.
        modes: one pair of a mode ("medusa", "eagle1", "eagle3", or "eagle" for eagle3) and its configuration with
            ModelOpt's names.
        save_base: write the model's own weights in `save_pretrained` too.

    Returns:
        The model.

    Raises:
        ConfigError: the mode or a name of the configuration is unknown or refused.
        UnsupportedModelError: the architecture is not supported, or embedding or output layer are computed differently.
    """
    if isinstance(model, Converted):
        raise ConfigError("the model is converted already; load it anew for another head")
    mode, config = _one(modes)
    objective, chosen = read(mode, config)
    if mode in ALIASES:
        warnings.warn(f"mode {mode!r} {meaning(mode)}", stacklevel=2)
    target = base.config_of(model)
    base.check_outer(model)
    ids = read_vocabulary(chosen.vocabulary, target.vocab_size)
    table = model.get_output_embeddings().weight
    with torch.device("cpu" if table.is_meta else table.device):
        made = objective.modelopt.configure(objective, chosen, target, ids)
        seed = int(torch.randint(2**31, (), device="cpu"))  # so `transformers.set_seed` determines the initial weights
        generator, std = torch.Generator(table.device).manual_seed(seed), objective.modelopt.std(chosen, STD)
        head = objective.create(made, table.detach(), ids, generator, std)
    return _attach(model, objective, head, Conversion(mode, config, chosen, target, save_base))


def _one(modes: Sequence[tuple[str, Mapping[str, Any]]]) -> tuple[str, Mapping[str, Any]]:
    """Return the only pair of a mode and a configuration."""
    match modes:
        case [(str() as mode, Mapping() as config)]:
            return mode, config
    raise ConfigError(f"got modes {modes!r}, expected one pair of a name and a mapping, as in [({MODES[0]!r}, {{}})]")


def restore(model: Any, directory: str | Path) -> Any:
    """Attach the head that `save_pretrained` wrote to a model, to continue training.

    Args:
        model: same model as before, as transformers loads it.

    Raises:
        CheckpointError: the directory contains no such head, or a damaged one.
        DraftMismatchError: the head belongs to another model.
    """
    if isinstance(model, Converted):
        raise ConfigError("the model is converted already; load it anew for another head")
    place = user_path(directory)
    try:
        content = read_object(place / MANIFEST)
        if content.get("format") != FORMAT:
            raise CheckpointError(f"{place / MANIFEST}: format {content.get('format')!r}, expected {FORMAT}")
        mode, config, save_base = content["mode"], content["config"], content["save_base"]
        files = sorted(place.glob("model*.safetensors"))
        stored = {name: value for file in files for name, value in load_file(file).items() if name.startswith(PREFIX)}
    except DataError as error:
        raise CheckpointError(f"{place}: holds no head in training ({error.problem})") from error
    except (KeyError, OSError, ValueError, SafetensorError) as error:
        raise CheckpointError(f"{place}: damaged ({error}); save it again") from error
    target = base.config_of(model)
    base.check_outer(model)
    device = model.get_output_embeddings().weight.device
    head = read_head(place / HEAD, target, torch.float32, device, pack=False).module
    objective, chosen = read(mode, config)
    found = _attach(model, objective, head, Conversion(mode, config, chosen, target, save_base))
    found.load_state_dict(stored)
    return found


def _attach(model: Any, objective: type[HeadObjective], head: Head, plan: Conversion) -> Any:
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    own = type(model)
    # Unchanged name, so that files name an architecture of transformers.
    model.__class__ = type(own.__name__, (Converted, own), {"__module__": own.__module__})
    name = str(getattr(model.config, "_name_or_path", "") or own.__name__)
    outer = base.outer_of(model, plan.target)
    setattr(model, PART, objective(head, outer, plan.chosen.loss, torch.float32, target_name=name))
    model.sametoken_plan = plan
    model.train(model.training)
    return model


def _batch(tokens: Tensor, real: Tensor, labels: Tensor) -> Batch:
    """Batch of the concatenated rows, without padding."""
    if labels.shape != tokens.shape or real.shape != tokens.shape:
        raise DataError(
            f"input_ids are {list(tokens.shape)}, attention_mask {list(real.shape)}, labels {list(labels.shape)}; "
            "expected one shape"
        )
    if bool((real[:, 1:] != real[:, :-1]).sum(-1).gt(1).any()):
        raise DataError("attention_mask has padding between tokens, expected it before or after them")
    wanted = (labels != IGNORED) & real
    if not torch.equal(tokens[wanted], labels[wanted]):
        raise DataError(
            f"labels differ from input_ids at {int((tokens != labels)[wanted].sum())} tokens, expected the same ids or "
            f"{IGNORED}: they are moved here, not in the data"
        )
    lengths = tuple(length for length in real.sum(-1).tolist() if length)
    return Batch(tokens[real], wanted[real], lengths)


def _computed_in(last: Tensor) -> torch.dtype:
    """Data type of the head's computation: autocast's if enabled, else the model's."""
    device = last.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else last.dtype


def _figures(report: AcceptanceMetrics) -> dict[str, Tensor]:
    accuracies = (report.path / report.reached.clamp(min=1)).float()
    return {"accuracies": accuracies, "acceptance_length": 1 + accuracies.cumprod(0).sum()}
