"""`RunConfig`, which all members of a run share, and the `Manifest`, by which they compare it.

A manifest defines a run: its configuration, its data and its initial weights. It travels as
canonical JSON (sorted keys, no spaces), and its SHA-256 stands for it everywhere. Two nodes with
different manifests do not train together. They are told the first field that differs.
"""

import dataclasses
import hashlib
import json
import math
import re
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import pydantic_core

from decod.compression.plan import CompressionError, StagePlans
from decod.config.strict import MirrorError, build
from decod.data.tokenizer import (
    GENERATION_FILE,
    SPECIAL_TOKENS_FILE,
    TOKENIZER_CONFIG_FILE,
)
from decod.errors import ConfigError, MalformedMessageError, RejectedError
from decod.limits import STAGE_INDEX_MAX
from decod.model.shape import block_shapes, outer_shapes, trained_shapes
from decod.protocol.core.average_spec import FRAGMENTS_MAX, AverageFormat, AverageSpec
from decod.protocol.flows.registry import ROUTINGS
from decod.run.model_config import ModelConfig, ModelDtype, Shapes
from decod.run.protocol_config import PROTOCOL_VERSION
from decod.run.run_config import Organisation, RunConfig
from decod.run.stages_config import stage_blocks
from decod.run.training_config import (
    SYNC_EVERY_MAX,
    ActivationCompression,
    Adapt,
    OptimizerName,
    WireDtype,
)

# The part of the manifest that a run carries from the folder of `--init` to every export.
#
# It holds files that lie beside the weights: the chat template, special tokens and the like.
# It may come from a dishonest peer. It is only ever written into files of fixed names, beside an
# exported model.

if TYPE_CHECKING:
    from tokenizers import AddedToken

NOTHING = "none"
"""The text of a run that began without a folder."""

CARRIED_MAX_CHARACTERS = 96 * 1024
"""Size of the text. Within the manifest's JSON, it may grow to twice that."""

JSON_FILES = (TOKENIZER_CONFIG_FILE, SPECIAL_TOKENS_FILE, GENERATION_FILE)
"""Files whose objects are carried."""

_MODEL_NAME = re.compile(
    r"([A-Za-z0-9][A-Za-z0-9_.-]{0,95}(/[A-Za-z0-9_.-]{1,96}(@[0-9a-f]{40})?)?)?\Z"
)
_TOKEN_ID = re.compile(r"(0|[1-9][0-9]{0,7})\Z")
_FLAGS = ("special", "normalized", "lstrip", "rstrip", "single_word")


@dataclass(frozen=True, slots=True, kw_only=True)
class Carried:
    """The files that are carried. The constructor checks its form."""

    base_model: str = ""
    """The model's name: OWNER/NAME or OWNER/NAME@COMMIT of the Hugging Face Hub if that is known,
    else that of its folder."""
    objects: dict[str, dict[str, Any]] = field(default_factory=dict)
    """The objects in JSON files, by the files' names."""
    template: str = ""
    """The chat template, if it has a file of its own."""
    added_tokens: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Tokens that the model's tokenizer has, and that of the data lacks: their flags by id."""

    def __post_init__(self) -> None:
        if not _MODEL_NAME.match(self.base_model):
            raise _refuse("base_model", self.base_model)
        for name in self.objects:
            if name not in JSON_FILES:
                raise _refuse("objects", name)
        for token_id, token in self.added_tokens.items():
            fits = token.keys() == {"content", *_FLAGS} and isinstance(token["content"], str)
            if not _TOKEN_ID.match(token_id) or not fits or not token["content"]:
                raise _refuse("added_tokens", token_id)

    def to_text(self) -> str:
        """Return the canonical text: keys sorted, no spaces, ASCII."""
        return json.dumps(asdict(self), sort_keys=True, separators=(",", ":"), allow_nan=False)

    @classmethod
    def from_text(cls, text: str) -> "Carried":
        """Return what a manifest's text says.

        Raises:
            ConfigError: It is too long, or no canonical text.
        """
        if text == NOTHING:
            return cls()
        if len(text) > CARRIED_MAX_CHARACTERS:
            raise _refuse("a text", f"of {len(text)} characters")
        try:
            carried = cls(**_checked_types(json.loads(text)))
            if carried.to_text() == text:
                return carried
        except (ValueError, TypeError, AttributeError, RecursionError):
            pass
        raise _refuse("a text", text)

    def tokens(self) -> "list[tuple[int, AddedToken]]":
        """Return the added tokens with their ids."""
        from tokenizers import AddedToken

        return [
            (int(token_id), AddedToken(each["content"], **{f: each[f] is True for f in _FLAGS}))
            for token_id, each in self.added_tokens.items()
        ]


def _checked_types(values: Any) -> dict[str, Any]:
    """Return the fields in a text, if each is of its type."""
    for name, value in values.items():
        fits = isinstance(value, str)
        if name not in ("base_model", "template"):
            fits = isinstance(value, dict) and all(isinstance(v, dict) for v in value.values())
        if not fits:
            raise _refuse(name, value)
    return dict(values)


def flags_of(token: "AddedToken") -> dict[str, Any]:
    """Return a token as `added_tokens` has it."""
    return {"content": token.content} | {name: getattr(token, name) for name in _FLAGS}


def _refuse(name: str, value: object) -> ConfigError:
    return ConfigError(
        f"carried has {name} {ascii(value)[:80]}",
        why="a run carries the files beside a model's weights in one fixed form",
        fix="begin the run again with --init and the model's folder",
    )


MANIFEST_SIZE_MAX_BYTES = 256 * 1024
"""Largest manifest that is read from a peer. A real one has about 2 KiB, and with the chat template
of a model often 10."""

ACTIVATION_SIZE_MAX_BYTES = 1 << 30
"""Largest activations of one microbatch. Also the most that a peer can make a node allocate."""

NUM_PARAMETERS_MAX = 1 << 40

_HALVES_MAX = 6
"""Ranks among which `sync.adapt` chooses: the first, a half of it, a quarter and so on."""

# Upper ends of ranges. The owners check the lower ends. These limits are checked before any
# relation between fields, so that a peer's manifest can't demand absurd amounts of memory or time.
_UPPER_LIMITS = {
    "model.vocab_size": 1 << 24,
    "model.hidden_size": 1 << 18,
    "model.intermediate_size": 1 << 20,
    "model.num_hidden_layers": 4096,
    "model.num_attention_heads": 1 << 12,
    "model.num_key_value_heads": 1 << 12,
    "model.head_dim": 1 << 16,
    "model.max_position_embeddings": 1 << 24,
    "model.norm_eps": 1.0,
    "model.rope_theta": 1e12,
    "model.rope_factor": 1e6,
    "model.rope_low_freq_factor": 1e6,
    "model.rope_high_freq_factor": 1e6,
    "model.rope_original_max_position_embeddings": 1 << 24,
    "stages.num_relay_stages": STAGE_INDEX_MAX,
    "stages.num_first_blocks": 4096,
    "batch.sequence_length": 1 << 24,
    "batch.microbatch_size": 1 << 16,
    "batch.num_microbatches": 1 << 16,
    "batch.num_data_nodes": 1 << 12,
    "optimizer.lr": 1e3,
    "optimizer.eps": 1.0,
    "optimizer.weight_decay": 1e3,
    "optimizer.warmup_iterations": 1 << 40,
    "optimizer.decay_iterations": 1 << 40,
    "optimizer.clip_norm": 1e12,
    "sync.every": SYNC_EVERY_MAX,
    "sync.fragments": FRAGMENTS_MAX,
    "sync.outer_lr": 1e3,
    "sync.rank": 1 << 20,
    "protocol.heartbeat_timeout_s": 86_400.0,
}

_SHA256 = re.compile(r"[0-9a-f]{64}\Z")


def count_parameters(model: ModelConfig) -> int:
    """Return how many parameters a model has. Tied embeddings count once."""
    blocks = range(model.num_hidden_layers)
    return sum(_count(block_shapes(model, index)) for index in blocks) + _count(outer_shapes(model))


def _count(shapes: Shapes) -> int:
    return sum(math.prod(shape) for shape in shapes.values())


def activation_size_bytes(run: RunConfig) -> int:
    """Return the bytes of one microbatch's activation, or of its gradient, on its way."""
    coding = run.activations.coding(run.model.hidden_size, run.batch.sequence_length)
    num_tokens = run.batch.tokens_per_microbatch
    num_elements = num_tokens * run.model.hidden_size
    num_bytes = _computed_size_bytes(run) if coding is None else coding.num_bytes(num_elements)
    # A byte for each position tells whether it begins a document.
    return num_bytes + (num_tokens if run.batch.reads_apart else 0)


def _computed_size_bytes(run: RunConfig) -> int:
    """Return the bytes of one microbatch's activation as the model computes it."""
    return run.batch.tokens_per_microbatch * run.model.hidden_size * run.model.dtype.num_bytes


def validate(run: RunConfig) -> None:
    """Check upper limits, and relations between sections that no owner can check alone.

    Raises:
        ConfigError: A check failed. Its text begins with the key that should be changed first.
    """
    for key, limit in _UPPER_LIMITS.items():
        section, _, name = key.partition(".")
        value = getattr(getattr(run, section), name)
        if not 0 <= value <= limit:
            raise ConfigError(
                f"{key} is {value}",
                why="the sizes that decod can work with end there",
                fix=f"give a value from 0 to {limit}",
            )
    if run.protocol.routing not in ROUTINGS:
        raise ConfigError(
            f"protocol.routing is {ascii(run.protocol.routing)[:40]}",
            why="there is no such routing",
            fix=f"give one of {', '.join(ROUTINGS)}",
        )
    if run.model.rope_theta <= 0:
        raise ConfigError(
            f"model.rope_theta is {run.model.rope_theta}",
            why="the base of the rotary angles is raised to powers",
            fix="give a positive number, usually 10000.0",
        )
    if run.batch.sequence_length > run.model.max_position_embeddings:
        raise ConfigError(
            f"batch.sequence_length is {run.batch.sequence_length}",
            why="it is longer than model.max_position_embeddings, "
            f"{run.model.max_position_embeddings}",
            fix="shorten the sequences or raise model.max_position_embeddings",
        )
    if run.batch.reads_apart and not run.model.can_read_apart:
        raise ConfigError(
            "batch.documents is apart, or auto, and the corpus tells where documents begin",
            why="this model can't read them apart, as docs/models.md tells",
            fix='set batch.documents = "together", or choose another model',
        )
    stage_blocks(run.model, run.stages)
    run.adapter.of(run.model)
    _validate_sizes(run)
    _validate_sync(run)
    if run.organisation is Organisation.SERVERS:
        _validate_servers(run)


def plans_of(run: RunConfig) -> dict[int, StagePlans]:
    """Return how the averages of each stage travel.

    Raises:
        CompressionError: A stage has fewer parameters than there are fragments.
    """
    sync = run.sync
    wide = "float64" if run.model.dtype is ModelDtype.FLOAT64 else "float32"
    stages = range(run.stages.num_relay_stages + 1)
    # A stage's flat buffers are in sorted order of names, as in `Layout`.
    ordered = [sorted(trained_shapes(run, k).items()) for k in stages]
    return {
        k: StagePlans([s for _, s in named], sync.fragments, sync.compression_config, wide=wide)
        for k, named in enumerate(ordered)
    }


def wire_element_bytes(run: RunConfig) -> int:
    """Return the bytes of an element of an average that travels whole."""
    if run.model.dtype is ModelDtype.FLOAT64:
        return 8
    return 2 if run.reduction.wire_dtype is WireDtype.BFLOAT16 else 4


def average_size_bytes(run: RunConfig) -> list[int]:
    """Return the bytes of each stage's averages at the start of a run: of its largest fragment."""
    found = list[int]()
    for stage in plans_of(run).values():
        sizes = list[int]()
        for fragment in stage.fragments[1:]:
            plan = stage.plan(fragment.index, 0, 0)
            whole = fragment.num_elements * wire_element_bytes(run)
            sizes.append(whole if plan is None else plan.num_bytes)
        found.append(max(sizes))
    return found


_BITS = 4
"""Of averages that follow the links. So few cost no loss in Streaming DiLoCo (arXiv:2501.18512), on
low-precision outer gradients."""


def formats_of(run: RunConfig) -> tuple[AverageFormat, ...]:
    """Return in which formats averages may travel, the largest first. None: there is no choice.

    All have 4 bits. More would cost time, and save no loss.
    """
    sync = run.sync
    if sync.adapt is not Adapt.LINKS:
        return ()
    halves = [sync.rank >> k for k in range(_HALVES_MAX) if sync.rank >> k]
    ranks = [0, *halves[1:]] if sync.compression.has_factors else [0]
    stages = plans_of(run).values()
    made = list[AverageFormat]()
    for rank in ranks:
        plans = [p.plan(f.index, rank, _BITS) for p in stages for f in p.fragments[1:]]
        size = max(p.num_bytes for p in plans if p is not None)
        made.append(AverageFormat(AverageSpec(rank=rank, bits=_BITS), size))
    return tuple(made)


def _validate_sync(run: RunConfig) -> None:
    sync = run.sync
    if run.optimizer.name is OptimizerName.MUON and not sync.steps_locally:
        raise ConfigError(
            "optimizer.name is muon",
            why="members on different hardware get other bits of a product of matrices, and so "
            "would not agree on a step that all take",
            fix='set sync.method to "diloco", in which each member steps by itself',
        )
    try:
        plans = plans_of(run)
    except CompressionError as error:
        raise ConfigError(
            f"sync.{error}",
            why="each fragment has an average of its own",
            fix="lower sync.fragments",
        ) from error
    if sync.compression_config is None:
        return
    if run.optimizer.clip_norm and not sync.steps_locally:
        raise ConfigError(
            f"optimizer.clip_norm is {run.optimizer.clip_norm}",
            why="the norm of a compressed gradient is not the gradient's",
            fix='set it to 0, or sync.compression to "none"',
        )
    for stage, fragment in ((stage, f) for stage, p in plans.items() for f in p.fragments):
        plan = plans[stage].plan(fragment.index, 0, 0)
        if sync.compression.has_factors and (plan is None or not any(plan.ranks)):
            place = f"of stage {stage}" + (f", fragment {fragment.index}" * (sync.fragments > 1))
            raise ConfigError(
                f"sync.rank is {sync.rank}",
                why=f"factors of that rank would be larger than every matrix {place}",
                fix="lower it, or sync.fragments, or use another sync.compression",
            )


def _validate_servers(run: RunConfig) -> None:
    """Check that clients, which have no optimizer, can do what the run asks of members."""
    sync = run.sync
    why = "clients of servers hold parameters only, and nothing of the optimizer's"
    if sync.steps_locally:
        raise ConfigError(
            f"sync.every is {sync.every}",
            why=f"{why}: they can't step by themselves",
            fix='set it to 1, or organisation to "pipeline"',
        )
    if sync.compression_config is not None:
        raise ConfigError(
            f"sync.compression is {sync.compression.value}",
            why=f"{why}: they can't keep what the format leaves out",
            fix='set it to "none", or organisation to "pipeline"',
        )


def _validate_sizes(run: RunConfig) -> None:
    num_parameters = count_parameters(run.model)
    if num_parameters >= NUM_PARAMETERS_MAX:
        raise ConfigError(
            f"model.hidden_size is {run.model.hidden_size}",
            why=f"with the other sizes it makes {num_parameters:,} parameters; the limit is 2^40",
            fix="lower the width, the number of layers or the vocabulary",
        )
    compression = run.activations.compression
    if compression is ActivationCompression.INT4 and run.model.hidden_size % 16:
        raise ConfigError(
            f"activations.compression is {compression}",
            why=f"16 does not divide model.hidden_size = {run.model.hidden_size}, so the scales "
            "would take as much as they save",
            fix='set activations.compression to "int8"',
        )
    size_bytes = max(activation_size_bytes(run), _computed_size_bytes(run))
    if size_bytes > ACTIVATION_SIZE_MAX_BYTES:
        raise ConfigError(
            f"batch.microbatch_size is {run.batch.microbatch_size}",
            why=f"one microbatch's activations would have {size_bytes / 2**30:.1f} GiB, "
            "more than the 1 GiB that a node accepts",
            fix="lower batch.microbatch_size or batch.sequence_length",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """The facts on which every member must agree before it trains. Every instance is valid."""

    run: RunConfig
    """The configuration."""
    data_index_sha256: str
    """SHA-256 of the canonical index of the token shards, 64 hexadecimal digits."""
    data_vocab_size: int
    """Number of tokens of the data's tokenizer, at most `run.model.vocab_size`."""
    initial_weights: str = "seed"
    """`seed`, or the SHA-256 of the folder of weights or of the checkpoint to start from."""
    start_iteration: int = 0
    """The iteration of the checkpoint; 0 for a new run. The run continues with the next iteration,
    so that it reads the tokens that would have come next."""
    carried: str = NOTHING
    """What lies beside the weights in the folder of `--init`, as `Carried` spells it: every export
    gets it back. `none` without such a folder."""
    base: str = ""
    """The hashes of the weights beside which the run trains an adapter, part by part, 64
    hexadecimal digits each (`decod.train.checkpoint.base`). Empty: it trains all parameters."""
    protocol_version: int = PROTOCOL_VERSION
    """Protocol version of the release that made it."""

    def __post_init__(self) -> None:
        validate(self.run)
        if not _SHA256.match(self.data_index_sha256):
            raise ConfigError(
                f"data_index_sha256 is {ascii(self.data_index_sha256)[:80]}",
                why="a SHA-256 has 64 hexadecimal digits",
                fix="prepare the data again with `decod data prepare`",
            )
        if self.initial_weights != "seed" and not _SHA256.match(self.initial_weights):
            raise ConfigError(
                f"initial_weights is {ascii(self.initial_weights)[:80]}",
                why="weights come from the seed or are known by their SHA-256",
                fix='give "seed" or 64 hexadecimal digits',
            )
        if not 0 <= self.start_iteration <= 1 << 40 or (
            self.start_iteration > 0 and self.initial_weights == "seed"
        ):
            raise ConfigError(
                f"start_iteration is {self.start_iteration}",
                why="only a checkpoint is of an iteration, and none reaches 2^40",
                fix="resume from a checkpoint, or start a new run",
            )
        Carried.from_text(self.carried)
        num_parts = self.run.num_base_parts
        if not re.fullmatch(f"[0-9a-f]{{{64 * num_parts}}}", self.base):
            raise ConfigError(
                f"base has {len(self.base)} characters",
                why=f"the run needs {num_parts} hashes of 64 hexadecimal digits there",
                fix="start the run with the folder of a model in --base"
                if num_parts
                else 'leave --base out, or give adapter.kind = "lora"',
            )
        if self.protocol_version != PROTOCOL_VERSION:
            raise ConfigError(
                f"protocol_version is {self.protocol_version}",
                why=f"this release speaks version {PROTOCOL_VERSION}",
                fix="install the same release as the other members",
            )
        if not 1 <= self.data_vocab_size <= self.run.model.vocab_size:
            raise ConfigError(
                f"model.vocab_size is {self.run.model.vocab_size}",
                why=f"the data's tokenizer has {self.data_vocab_size} tokens, "
                "and each needs a row of the embedding",
                fix=f"set model.vocab_size = {max(self.data_vocab_size, 1)} or larger",
            )

    def to_json(self) -> str:
        """Return the canonical text: keys sorted, no spaces, ASCII."""
        return json.dumps(
            dataclasses.asdict(self), sort_keys=True, separators=(",", ":"), allow_nan=False
        )

    @property
    def sha256(self) -> str:
        """SHA-256 of the canonical text, 64 hexadecimal digits."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()

    @classmethod
    def from_json(cls, text: str | bytes) -> "Manifest":
        """Read and check a manifest that a peer sent.

        Raises:
            RejectedError: The peer speaks another version of the protocol (E-REJ-002).
            MalformedMessageError: The manifest is invalid in another way (E-PEER-010).
        """
        values = _parse_json(text)
        version = values.get("protocol_version")
        if type(version) is int and version != PROTOCOL_VERSION:
            raise RejectedError(
                f"the run speaks protocol version {version}, this node {PROTOCOL_VERSION}",
                why="members of one run must understand each other",
                fix="install the release of decod that the run's organiser uses",
                code="E-REJ-002",
            )
        try:
            manifest = build(cls, values)
        except MirrorError as error:
            problem = error.problems[0]
            raise _malformed(problem.what, problem.why) from None
        except ConfigError as error:
            raise _malformed(error.what, error.why) from None
        received = text.encode() if isinstance(text, str) else text
        if received != manifest.to_json().encode():
            # Two spellings of one manifest would have two hashes.
            raise _malformed("the text is not canonical", "its hash stands for the run")
        return manifest

    def flat(self) -> dict[str, Any]:
        """Return every value by its dotted key, like `run.model.hidden_size`."""
        return flatten(dataclasses.asdict(self))

    def first_difference(self, other: "Manifest") -> str | None:
        """Return the first difference, like `run.seed is 1 here and 2 there`, or None."""
        mine = self.flat()
        theirs = other.flat()
        for key, value in mine.items():
            if value != theirs[key]:
                return f"{key} is {value} here and {theirs[key]} there"
        return None


def _malformed(what: str, why: str) -> MalformedMessageError:
    return MalformedMessageError(
        f"bad manifest: {what}",
        why=why,
        fix="ask the run's organiser for a new join string",
        code="E-PEER-010",
    )


def _parse_json(text: str | bytes) -> dict[str, Any]:
    # A character has at least one byte, so this bounds the work of encoding too.
    if len(text) > MANIFEST_SIZE_MAX_BYTES:
        raise _malformed(
            f"it has {len(text)} bytes", f"the limit is {MANIFEST_SIZE_MAX_BYTES} bytes"
        )
    try:
        # Pydantic's parser bounds the depth. The standard library's would recurse without limit.
        values = pydantic_core.from_json(
            text.encode() if isinstance(text, str) else text, allow_inf_nan=False
        )
    except ValueError as error:
        raise _malformed("it is not JSON", str(error)[:100]) from None
    if not isinstance(values, dict):
        raise _malformed("it is not a JSON object", "a manifest has named fields")
    return values


def flatten(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested values by their dotted keys."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, dict):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat
