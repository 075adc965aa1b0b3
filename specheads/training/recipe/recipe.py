"""A recipe: base, head, data and training of one run as YAML, with dotted overrides, checked before anything loads."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import yaml

from specheads.data.config import DataConfig
from specheads.heads import HEADS, HeadConfig, head_config
from specheads.models.base.lora import JointConfig
from specheads.options import read_yaml, shown
from specheads.training.distributed.launch import LaunchConfig
from specheads.training.parity import ParityConfig
from specheads.training.recipe.reader import SECTIONS, key_of, names_in, read_options, read_section


class RecipeError(ValueError):
    """A recipe, or an override, that cannot be run; the message says why in one line."""


DType = Literal["auto", "float32", "bfloat16", "float16"]
Quantize = Literal["4bit", "8bit", "int8"]


@dataclass(frozen=True)
class Recipe:
    """What one run of train/heads.py does.

    base: path or hub id; base_dtype and head_dtype: "auto", "float32", "bfloat16" or "float16" ("auto" is what the
    base was saved in); quantize: the base's weights, to 4bit or 8bit with bitsandbytes (with lora: QLoRA), or to int8
    on a CPU; attn_implementation: the base's. features: a folder of saved features, used instead of base, data and
    their options, which are then ignored. head: {kind: …, options}. init_from: a head checkpoint to continue from,
    instead of a new head. training: SpecTrainingArguments by name; resume_from_checkpoint: auto is the last one in
    output_dir, if any. early_stopping: how many evaluations without a better training.metric_for_best_model end the
    run. launch: what the launcher is expected to have started. parity: the comparison with real decoding at the end
    of the run; parity.prompts=0 skips it. evaluation_share: how many rows evaluations may have as a share of those
    trained on, and the parity gate as a share of training's time; null: no bound. lora: adapters on the base that
    train with the head, see JointConfig.
    """

    training: dict[str, Any]
    base: str = ""
    data: DataConfig | None = None
    features: str | None = None
    head: HeadConfig | None = None
    base_dtype: DType = "auto"
    head_dtype: DType = "float32"
    quantize: Quantize | None = None
    attn_implementation: str | None = None
    init_from: str | None = None
    early_stopping: int | None = None
    evaluation_share: float | None = 0.1
    launch: LaunchConfig = field(default_factory=LaunchConfig)
    parity: ParityConfig = field(default_factory=ParityConfig)
    lora: JointConfig | None = None

    def __post_init__(self) -> None:
        if self.features == "":
            raise RecipeError("features='': expected a folder that `specheads features` has filled, or null")
        if self.features is not None and self.lora is not None:
            raise RecipeError(
                "lora trains the base too, which saved features stand in for: give lora=null or no features"
            )
        if not (self.base or self.features):
            raise RecipeError(f"base={self.base!r}: expected a path or a hub id")
        if self.early_stopping is not None and self.early_stopping < 1:
            raise RecipeError(f"early_stopping={self.early_stopping}: expected a whole number of at least 1")
        if self.evaluation_share is not None and self.evaluation_share <= 0:
            raise RecipeError(
                f"evaluation_share={self.evaluation_share}: expected a share above 0, such as 0.1, or null"
            )
        if (self.head is None) == (self.init_from is None):
            raise RecipeError(
                "give either head (a new one: head.kind=eagle3) or init_from (a head checkpoint to continue from), not "
                + ("neither" if self.head is None else "both; with init_from write head=null")
            )
        if self.lora is not None and self.init_from is not None:
            raise RecipeError(
                "lora puts new adapters on a base; with init_from those of that checkpoint are trained on"
            )
        if self.early_stopping is not None and not self._picks_the_best():
            raise RecipeError(
                f"early_stopping={self.early_stopping} needs training.eval_strategy other than no, "
                "training.metric_for_best_model (accepted_length, say) and training.load_best_model_at_end=true"
            )
        if not self.training.get("output_dir"):
            raise RecipeError("training.output_dir is missing: give the folder the head is saved to")

    def _picks_the_best(self) -> bool:
        wanted = ("metric_for_best_model", "load_best_model_at_end")
        return str(self.training.get("eval_strategy", "no")) != "no" and all(self.training.get(n) for n in wanted)

    def to_yaml(self) -> str:
        """The recipe as YAML, without defaults, and without hub tokens, since cards show it; rows given in memory
        cannot be part of it."""

        def changed(section: Any) -> dict[str, Any]:
            named = () if section is None else dataclasses.fields(section)
            values = {f.name: (getattr(section, f.name), f.default) for f in named}
            return {name: value for name, (value, usual) in values.items() if value != usual and _plain(value)}

        sections = {name: changed(getattr(self, name)) for name in ("data", "launch", "parity")}
        sections |= {"head": self.head.to_dict() if self.head else {}, "lora": self.lora.to_dict() if self.lora else {}}
        sections["training"] = {
            name: value for name, value in self.training.items() if _plain(value) and not name.endswith("_token")
        }
        return yaml.safe_dump(changed(self) | {n: part for n, part in sections.items() if part}, sort_keys=False)

    @classmethod
    def from_dict(cls, options: Mapping[str, Any]) -> Recipe:
        """RecipeError for an unknown, missing or malformed option, with its dotted name."""
        if not isinstance(options, Mapping):
            raise RecipeError(f"a recipe is a mapping with base, head, data and training, not {options!r:.60}")
        top = _top()
        try:
            for name in options:
                if name not in top and (key := key_of(str(name), top)):
                    raise RecipeError(f"unknown option {shown(str(name))}; did you mean {key!r}?")
            required = ("training",) if options.get("features") else ("base", "data", "training")
            if missing := [name for name in required if options.get(name) is None]:
                raise RecipeError(f"{missing[0]} is missing: set it in the recipe or as {missing[0]}=…")
            sections = {name: read_section(name, options.get(name), top) for name in SECTIONS}
            plain = {name: value for name, value in options.items() if name not in SECTIONS}
            has = {name: options.get(name) is not None for name in SECTIONS}
            return cls(
                **read_options(cls, {**plain, "base": options.get("base") or ""}),
                training=_training(sections["training"]),
                data=DataConfig.from_dict(read_options(DataConfig, sections["data"], "data.")) if has["data"] else None,
                launch=LaunchConfig(**read_options(LaunchConfig, sections["launch"], "launch.")),
                parity=ParityConfig(**read_options(ParityConfig, sections["parity"], "parity.")),
                lora=JointConfig.of(sections["lora"]) if has["lora"] else None,
                head=_head(sections["head"]) if has["head"] else None,
            )
        except RecipeError:
            raise
        except (ValueError, TypeError) as error:
            raise RecipeError(str(error)) from error


def key_hint(flag: str, value: str, *, similar: bool) -> str:
    """`; did you mean KEY=VALUE?` for a flag that has the name of a recipe's option, or a similar one; "" otherwise."""
    key = key_of(flag, _top(), similar=similar)
    return "" if key is None else f"; did you mean {key}={value}? A recipe's options are given as KEY=VALUE"


def flag_key(flag: str) -> str | None:
    """The key of a flag that has the very name of a recipe's option, with or without its section: --learning-rate and
    --training.learning_rate. Of several options of one name it is the training section's."""
    section, dot, name = flag.lstrip("-").replace("-", "_").rpartition(".")
    if not dot and name not in SECTIONS and name in _top():
        return name
    sections = [section] if dot else [*SECTIONS]
    return next((f"{each}.{name}" for each in sections if each in SECTIONS and name in names_in(each)), None)


def read_recipe(path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """The recipe in a YAML file with `key=value` overrides: dotted keys, values typed as in YAML."""
    file = Path(path)
    if not file.is_file():
        raise RecipeError(f"no recipe {str(path)!r} (looked from {Path.cwd()})")
    options = parse_file(file)
    if not isinstance(options, Mapping):
        raise RecipeError(f"{path} holds {options!r:.60}: expected a mapping with base, head, data and training")
    return Recipe.from_dict(with_overrides(options, overrides))


def with_overrides(options: Mapping[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """`options` with each `a.b=value` set; a section that is absent or null is created."""
    result = _copied(options)
    for override in overrides:
        key, equals, text = override.partition("=")
        if not equals or not key:
            raise RecipeError(f"override {override!r}: expected key=value, for instance training.max_steps=100")
        *path, last = key.split(".")
        section = result
        for name in path:
            if section.get(name) is None:
                section[name] = {}
            section = section[name]
            if not isinstance(section, dict):
                raise RecipeError(f"override {override!r}: {name!r} is {section!r}, which has no options")
        section[last] = parse_yaml(text, f"override {override!r}")
    return result


def _copied(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _copied(item) for key, item in value.items()}
    return value


def _plain(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(map(_plain, value.values()))
    return isinstance(value, str | int | float | None) or (isinstance(value, list | tuple) and all(map(_plain, value)))


def parse_file(file: Path) -> Any:
    """The value of a YAML file. RecipeError, beginning with its name, if it is not YAML."""
    try:
        text = file.read_text("utf8")
    except UnicodeDecodeError as error:
        raise RecipeError(f"{file} is not UTF-8 text: {error}; save the file as UTF-8") from error
    return parse_yaml(text, str(file))


def parse_yaml(text: str, name: str) -> Any:
    """The value of a YAML text. RecipeError, beginning with `name`, if it is not YAML."""
    try:
        return read_yaml(text, name)
    except ValueError as error:
        raise RecipeError(str(error)) from error


def _top() -> list[str]:
    """The keys without a section, and the sections."""
    return [field.name for field in dataclasses.fields(Recipe)]


def _training(options: dict[str, Any]) -> dict[str, Any]:
    from specheads.training.recipe import arguments  # it takes seconds, which a typo elsewhere should not cost

    checked = read_options(arguments.SpecTrainingArguments, options, "training.")
    arguments.refuse_out_of_bounds(checked, section="training.")
    if (metric := checked.get("metric_for_best_model")) is not None:
        arguments.refuse_unknown_metric(metric.removeprefix("eval_"))
    return checked


def _head(options: dict[str, Any]) -> HeadConfig:
    if options.get("kind") is None:
        raise RecipeError(f"head.kind is missing: give one of {', '.join(HEADS)}")
    kind = options.pop("kind")
    return head_config(kind, options)
