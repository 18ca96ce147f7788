"""The check that two models share a vocabulary."""

from __future__ import annotations

from sametoken.checkpoint.tokenizer import Tokenizer
from sametoken.errors import DraftMismatchError


def check_same_tokenizer(target: Tokenizer, draft: Tokenizer) -> None:
    """Refuse a draft whose token ids mean something else than the target's.

    Compared are the vocabularies id by id, which ids are special, BOS, and that some token ends a text for both: an
    instruction-tuned target has more end tokens than a base draft. Padding rows of the models play no part.

    Raises:
        DraftMismatchError: with the first difference.
    """
    ours, theirs = ({index: text for text, index in t.vocab().items()} for t in (target, draft))
    for index in sorted(ours.keys() | theirs.keys()):
        if ours.get(index) != theirs.get(index):
            raise DraftMismatchError(
                f"the draft has another vocabulary: token {index} is {target.token_text(index)!r} in the target and "
                f"{draft.token_text(index)!r} in the draft (target {len(ours)} tokens, draft {len(theirs)}); "
                "use a draft with the target's tokenizer"
            )
    if different := sorted(target.special_ids ^ draft.special_ids):
        whose = "target" if different[0] in target.special_ids else "draft"
        raise DraftMismatchError(
            f"token {different[0]} ({target.token_text(different[0])!r}) is special only in the {whose}; "
            "use a draft with the target's tokenizer"
        )
    if target.bos_id != draft.bos_id:
        raise DraftMismatchError(
            f"BOS is {target.bos_id} in the target and {draft.bos_id} in the draft; use a draft with the same one"
        )
    if set(target.eos_ids).isdisjoint(draft.eos_ids) and (target.eos_ids or draft.eos_ids):
        raise DraftMismatchError(
            f"EOS is {list(target.eos_ids)} in the target and {list(draft.eos_ids)} in the draft, none in common; "
            "use a draft with the same one"
        )
