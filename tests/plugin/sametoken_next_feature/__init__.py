"""The record of next-feature heads: a small network predicts the target's next hidden state, token after token."""

from sametoken.kinds import Kind

KIND = Kind(
    name="next_feature",
    title="next-feature",
    what="a next-feature head",
    drafts="sametoken_next_feature.serving:NextFeature",
    weights="head",
    objective="sametoken_next_feature.training:TRAINING",
    marks=("next_feature_inner_size",),
    aliases={"train": ("next-feature",)},
)
