"""Names and shapes of a model's parameters, whole or per stage, and the memory of a microbatch.

Nothing here needs torch, so that a host can tell whether a stage fits before it loads anything. The
oracle of what a microbatch keeps between its passes is what autograd keeps on a CPU
(`decod.train.measure`). Other devices choose other kernels for attention, and may keep a little
more or less. If several query heads share a key head, CPUs keep keys and values once for every
query head (`decod.model.attention`). Estimates count them once for every key head, so that no stage
is refused that fits.
"""

import math

from decod.run.adapter_config import NO_ADAPTER, AdapterConfig
from decod.run.model_config import ModelConfig, ModelDtype, Shapes
from decod.run.run_config import RunConfig
from decod.run.stages_config import StagesConfig, stage_blocks
from decod.run.training_config import OptimizerName

LORA_A = "lora_A.weight"
LORA_B = "lora_B.weight"
"""Ends of the names of an adapter's matrices, as PEFT names them: (rank, inputs), and (outputs,
rank), which is zero at first."""

LOSS_ROWS_MIN = 128
"""Positions whose logits exist at a time. Fewer would make the matrix products slow."""


def block_shapes(model: ModelConfig, index: int) -> Shapes:
    """Return names and shapes of one block's parameters."""
    family = model.family
    shapes = family.block_shapes(model, index)
    return {f"{family.block_prefix}{index}.{name}": shape for name, shape in shapes.items()}


def outer_shapes(model: ModelConfig) -> Shapes:
    """Return names and shapes of the parameters outside the blocks: embedding, final norm, head."""
    shapes = dict(model.family.ends_shapes(model))
    if not model.tie_word_embeddings:
        shapes["lm_head.weight"] = (model.vocab_size, model.hidden_size)
    return shapes


def whole_matrices(run: RunConfig, stage_index: int) -> frozenset[str]:
    """Return the names of the matrices for which the run's optimizer takes steps as a whole.

    Those of Muon are the trained matrices of blocks, without embedding and head.
    """
    if run.optimizer.name is not OptimizerName.MUON:
        return frozenset()
    outer = outer_shapes(run.model)
    shapes = trained_shapes(run, stage_index).items()
    return frozenset(name for name, shape in shapes if len(shape) == 2 and name not in outer)


StoredTensors = dict[str, tuple[tuple[str, tuple[int, ...]], ...]]
"""By a parameter's name: names and shapes of the tensors of a file that hold its elements."""


def stored_tensors(model: ModelConfig) -> StoredTensors:
    """Return how a model's files hold each parameter: in one tensor of the same name, as a rule.

    The elements of a parameter are those of its tensors, one after another.
    """
    found: StoredTensors = {name: ((name, shape),) for name, shape in model_shapes(model).items()}
    layout = model.family.layout
    if layout is None:
        return found
    for index, block in enumerate(layout.blocks):
        prefix = f"{layout.block_prefix}{index}."
        for name, parts in block.stored.items():
            found[prefix + name] = tuple((key.replace("{}", prefix), shape) for key, shape in parts)
    return {**found, **layout.stored}


def part_shapes(model: ModelConfig, part: int) -> Shapes:
    """Return names and shapes of the parameters of a block, `part - 1`, or of those outside: 0."""
    return block_shapes(model, part - 1) if part else outer_shapes(model)


def model_shapes(model: ModelConfig) -> Shapes:
    """Return names and shapes of all parameters, in sorted order of names."""
    shapes = outer_shapes(model)
    for index in range(model.num_hidden_layers):
        shapes.update(block_shapes(model, index))
    return dict(sorted(shapes.items()))


def stage_shapes(model: ModelConfig, stages: StagesConfig, stage_index: int) -> Shapes:
    """Return names and shapes of one stage's parameters, in sorted order of names.

    Stage 0 holds embedding, final norm, head and its own first blocks.
    """
    shapes = outer_shapes(model) if stage_index == 0 else {}
    for index in stage_blocks(model, stages)[stage_index]:
        shapes.update(block_shapes(model, index))
    return dict(sorted(shapes.items()))


def adapter_shapes(model: ModelConfig, adapter: AdapterConfig, index: int) -> Shapes:
    """Return names and shapes of what is trained beside the matrices of one block."""
    shapes = block_shapes(model, index)
    found: Shapes = {}
    for target in adapter.of(model, index):
        name = f"{model.family.block_prefix}{index}.{target}"
        num_outputs, num_inputs = shapes[f"{name}.weight"]
        if model.family.transposed:
            num_outputs, num_inputs = num_inputs, num_outputs
        found[f"{name}.{LORA_A}"] = (adapter.rank, num_inputs)
        found[f"{name}.{LORA_B}"] = (num_outputs, adapter.rank)
    return found


def trained_shapes(run: RunConfig, stage_index: int) -> Shapes:
    """Return names and shapes of the parameters that a stage trains, in sorted order of names."""
    if run.trains_all:
        return stage_shapes(run.model, run.stages, stage_index)
    found: Shapes = {}
    for index in stage_blocks(run.model, run.stages)[stage_index]:
        found |= adapter_shapes(run.model, run.adapter, index)
    return dict(sorted(found.items()))


def frozen_shapes(run: RunConfig, stage_index: int) -> Shapes:
    """Return names and shapes of the parameters that a stage holds and does not train."""
    if run.trains_all:
        return {}
    return stage_shapes(run.model, run.stages, stage_index)


def frozen_bytes(run: RunConfig, stage_index: int) -> int:
    """Return the memory of the parameters that a stage does not train.

    Matrices of blocks have the base's format. All else has the model's dtype.
    """
    dtype = run.model.dtype
    total = 0.0
    for name, shape in frozen_shapes(run, stage_index).items():
        narrow = len(shape) > 1 and name.startswith(run.model.family.block_prefix)
        each_bytes = run.adapter.base.weight_bytes(dtype) if narrow else dtype.num_bytes
        total += each_bytes * math.prod(shape)
    return round(total)


_TOKEN_BYTES = 8
"""Token ids are int64."""


def input_bytes(model: ModelConfig, num_tokens: int, *, is_first: bool) -> int:
    """Return the size of a stage's input for one microbatch.

    Args:
        model: The whole model.
        num_tokens: Of a microbatch.
        is_first: For stage 0, which reads tokens. Other stages get activations.
    """
    each_bytes = _TOKEN_BYTES if is_first else model.hidden_size * model.dtype.num_bytes
    return num_tokens * each_bytes


def kept_bytes(
    model: ModelConfig,
    num_tokens: int,
    *,
    blocks: range,
    is_first: bool,
    adapter: AdapterConfig = NO_ADAPTER,
) -> int:
    """Return what a stage with some blocks keeps of one microbatch. Else as `input_bytes`.

    The blocks' inputs are part of it, and so is the stage's own.
    """
    token_bytes = _TOKEN_BYTES if is_first else 0
    for index in blocks:
        # What the first matrix of each pair has made.
        thin = len(adapter.of(model, index)) * adapter.rank
        token_bytes += _of_block(model, index) + thin * model.dtype.num_bytes
    return num_tokens * token_bytes


def loss_bytes(model: ModelConfig, num_tokens: int, *, trains_head: bool = True) -> int:
    """Return what the loss of a microbatch takes, with the gradient of the head if it is trained.

    That is the most of two instants: when the logits of some positions become their gradient, and
    when that is multiplied into the gradient of the head. See `decod.model.autograd`.
    """
    num_rows = min(LOSS_ROWS_MIN, num_tokens)
    width = model.hidden_size if trains_head else 0
    wide_bytes = _wide_bytes(model)
    # Narrow models have logits, and the head's gradient, in their own dtype beside the wide one.
    narrow_bytes = 0 if model.dtype.num_bytes == wide_bytes else model.dtype.num_bytes
    both_bytes = wide_bytes + narrow_bytes
    of_logits = num_rows * both_bytes + width * wide_bytes
    of_product = num_rows * model.dtype.num_bytes + width * both_bytes
    return model.vocab_size * max(of_logits, of_product)


def _wide_bytes(model: ModelConfig) -> int:
    return 8 if model.dtype is ModelDtype.FLOAT64 else 4


def _of_block(model: ModelConfig, index: int) -> int:
    """Return the bytes that one block keeps of one token."""
    numbers, wide_numbers = model.family.kept_numbers(model, index)
    return numbers * model.dtype.num_bytes + wide_numbers * _wide_bytes(model)
