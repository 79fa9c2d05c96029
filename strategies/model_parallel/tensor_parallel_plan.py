"""Find, by name and shape, the layers of a model that can be split across processes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise

from torch import Tensor, nn

from ...torch_private import Convolution

_Q = ("q", "q_proj", "query", "query_proj", "wq", "w_q", "W_q", "Wq", "to_q", "q_lin", "q_linear", "linear_q")
#: Names of an attention layer's three projections, keyed by the name of the first.
PROJECTIONS = {
    q: tuple(q.replace("query", word) for word in ("query", "key", "value"))
    if q.startswith("query")
    else tuple(q.replace("q", letter, 1) for letter in "qkv")
    for q in _Q
} | {"queries": ("queries", "keys", "values")}
#: Possible names of the layer that joins an attention layer's heads.
JOINS = ("o", "o_proj", "out_proj", "out", "wo", "w_o", "W_o", "Wo", "to_out", "out_lin", "out_linear", "output_proj",
         "proj", "c_proj", "dense", "output", "proj_out", "o_linear", "linear_o", "linear_out")  # fmt: skip
#: Layer names of an MLP: the layers that get its input, and the one that computes its output.
NETWORKS = (
    (("gate_proj", "up_proj"), "down_proj"),
    (("w1", "w3"), "w2"),
    (("gate", "up"), "down"),
    (("wi_0", "wi_1"), "wo"),
    (("fc1",), "fc2"),
    (("linear1",), "linear2"),
    (("c_fc",), "c_proj"),
    (("up_proj",), "down_proj"),
    (("up",), "down"),
    (("w1",), "w2"),
    (("wi",), "wo"),
    (("fc_in",), "fc_out"),
    (("lin1",), "lin2"),
    (("dense_h_to_4h",), "dense_4h_to_h"),
    (("intermediate.dense",), "output.dense"),
)
HEADS = ("num_heads", "n_heads", "nheads", "nhead", "n_head", "heads", "num_attention_heads", "n_local_heads")
KEY_HEADS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "n_kv_head", "kv_heads", "n_local_kv_heads")
HEAD_DIMS = ("head_dim", "d_head", "dim_head", "head_size", "attention_head_size", "d_k", "key_value_proj_dim")
#: Attributes with the total width of all heads.
WIDTHS = ("all_head_size", "inner_dim")
FUSED = ("qkv", "qkv_proj", "c_attn", "in_proj", "query_key_value", "Wqkv", "to_qkv", "attn_qkv", "to_kv", "kv_proj")
#: Possible names of the layer that computes the logits.
LAST = ("head", "lm_head", "output", "classifier", "logits", "unembed", "to_logits", "out", "decoder", "proj_out")
#: Featurewise operations, which are allowed between the two linear layers of a network.
FEATUREWISE = (
    nn.ReLU, nn.ReLU6, nn.GELU, nn.SiLU, nn.Mish, nn.ELU, nn.CELU, nn.SELU, nn.LeakyReLU, nn.Tanh, nn.Sigmoid,
    nn.Hardswish, nn.Hardtanh, nn.Hardsigmoid, nn.Softplus, nn.Softsign, nn.LogSigmoid, nn.Tanhshrink, nn.Identity,
    nn.Dropout,
)  # fmt: skip


@dataclass
class Attention:
    """An attention layer whose heads can be split across processes."""

    name: str
    projections: tuple[str, str, str]
    heads: int
    key_heads: int
    #: The module's attributes that hold the number of heads, or the total number of features in all heads.
    counts: list[str]
    #: Layers that treat each head independently, with the same weights for all heads.
    norms: list[str] = field(default_factory=list)

    def check(self, size: int, kind: str) -> None:
        """Raise an error if the number of heads is not divisible by the number of processes."""
        for count, what in ((self.heads, "heads"), (self.key_heads, "key and value heads")):
            if count % size:
                raise ValueError(
                    f"{kind} ({self.name}) has {count} {what}, which cannot be split across tensor_parallel={size} "
                    "processes. Set tensor_parallel to a divisor of the number of heads, or pass a plan without this "
                    "layer."
                )


@dataclass
class SplittableLayers:
    """The names of layers that can be split, and descriptions of similar layers that cannot (``not_split``)."""

    columns: list[str] = field(default_factory=list)
    rows: list[str] = field(default_factory=list)
    norms: list[str] = field(default_factory=list)
    #: Modules that consist of one MLP, found by its layer names.
    networks: list[str] = field(default_factory=list)
    attentions: list[Attention] = field(default_factory=list)
    not_split: list[str] = field(default_factory=list)


def is_transposed(layer: nn.Module) -> bool:
    """Return True if a linear layer stores its weight as (inputs, outputs), as GPT-2 in transformers does."""
    return type(layer).__name__ == "Conv1D" and getattr(layer, "nf", None) is not None


def find(module: nn.Module, size: int, strict: bool = True) -> SplittableLayers:
    """Find the attention layers and MLPs of a model that can be split across ``size`` processes.

    If ``strict``, heads that cannot be split evenly raise an error.
    """
    found = SplittableLayers()
    shared = _shared_weights(module)
    for name, owner in module.named_modules():
        layers = {
            f"{name}.{key}" if name else key: layer for key, layer in _layers(owner).items() if id(layer) not in shared
        }
        _find_attention(module, name, owner, layers, size, strict, found)
        _find_network(name, owner, layers, size, found)
    found.not_split = list(dict.fromkeys(found.not_split))
    return found


def find_head(module: nn.Module, size: int, taken: Iterable[str]) -> str:
    """Find the linear layer that computes a model's logits and can be split across ``size`` processes.

    Layers in ``taken`` are ignored.

    Raises:
        ValueError: there is no such layer, or the layer shares its weight, or its number of outputs is not divisible by
            ``size``.
    """
    taken = set(taken)
    named = [
        (name, layer)
        for name, layer in module.named_modules()
        if name.rpartition(".")[2] in LAST and type(layer) is nn.Linear and name not in taken
    ]
    if not named:
        raise ValueError(
            f"ModelParallelStrategy(loss_parallel=True) found no output layer in {type(module).__name__}. The "
            f"output layer must be an nn.Linear with a name such as {', '.join(LAST[:3])}. Leave loss_parallel out, or "
            "rename the layer."
        )
    name, head = named[-1]
    if id(head) in _shared_weights(module):
        raise ValueError(
            f"ModelParallelStrategy(loss_parallel=True): {name} shares its weight with another layer, which needs the "
            "full weight. Untie the two layers, or leave loss_parallel out."
        )
    if _outputs(head) % size:
        raise ValueError(
            f"ModelParallelStrategy(loss_parallel=True): the {_outputs(head)} outputs of {name} cannot be split "
            f"across tensor_parallel={size} processes. Pad the outputs to a multiple of {size}, or leave "
            "loss_parallel out."
        )
    return name


def _shared_weights(module: nn.Module) -> set[int]:
    """Return the ids of layers that share a weight."""
    owners: dict[int, list[int]] = {}
    for layer in module.modules():
        for parameter in layer.parameters(recurse=False):
            owners.setdefault(id(parameter), []).append(id(layer))
    return {layer for layers in owners.values() if len(layers) > 1 for layer in layers}


def _layers(owner: nn.Module) -> dict[str, nn.Module]:
    """Return the linear layers among a module's children, and the linear layers at known places inside its children."""
    found = {}
    for key, child in owner.named_children():
        if _linear(child):
            found[key] = child
        elif isinstance(child, (nn.Sequential, nn.ModuleList)) and len(child) and key in JOINS and _linear(child[0]):
            found[f"{key}.0"] = child[0]
        elif key in ("intermediate", "output") and _linear(dense := getattr(child, "dense", child)):
            found[f"{key}.dense"] = dense
    return found


def _linear(layer: nn.Module) -> bool:
    return type(layer) is nn.Linear or is_transposed(layer)


def inputs(layer: nn.Module) -> int:
    """Return the number of input features of a linear layer."""
    return _weight(layer).shape[0 if is_transposed(layer) else 1]


def _outputs(layer: nn.Module) -> int:
    return _weight(layer).shape[1 if is_transposed(layer) else 0]


def _weight(layer: nn.Module) -> Tensor:
    return layer.get_parameter("weight")


# ---- attention -------------------------------------------------------------------------------------------------------


def _find_attention(
    root: nn.Module,
    name: str,
    owner: nn.Module,
    layers: dict[str, nn.Module],
    size: int,
    strict: bool,
    found: SplittableLayers,
) -> None:
    kind = type(owner).__name__
    if isinstance(owner, nn.MultiheadAttention):
        found.not_split.append(f"{kind}, whose q, k and v are one matrix")
        return
    prefix = f"{name}." if name else ""
    fused = next((key for key in FUSED if isinstance(getattr(owner, key, None), nn.Module)), None)
    if fused is not None:
        found.not_split.append(f"{kind}.{fused}, which joins q, k and v in one matrix (use three separate layers)")
        return
    names = next((three for three in PROJECTIONS.values() if all(prefix + key in layers for key in three)), None)
    if names is None:
        return
    q, k, v = (prefix + key for key in names)
    join = _find_join(root, name, layers, (q, k, v))
    attention = _heads(name, owner, (q, k, v), layers)
    norms = attention.norms if attention else []
    problem = _problem(owner, join, {q, k, v, join or "", *norms}, prefix)
    if attention is None or problem:
        found.not_split.append(f"{kind}, {problem or f'which has no attribute {HEADS[0]} or {HEAD_DIMS[0]}'}")
        return
    if strict:
        attention.check(size, kind)
    found.attentions.append(attention)
    found.columns += [q, k, v]
    found.rows.append(join or "")
    found.norms += norms


def _find_join(
    root: nn.Module, name: str, layers: dict[str, nn.Module], projections: tuple[str, str, str]
) -> str | None:
    """Return the layer that joins the heads: a child, or (in BERT) ``output.dense`` of the parent module."""
    width = _outputs(layers[projections[2]])
    near = [key for key, layer in layers.items() if key not in projections]
    named = [key for key in near if key.removesuffix(".0").rpartition(".")[2] in JOINS]
    fits = [key for key in named if inputs(layers[key]) % width == 0]
    if fits:
        return fits[0]
    outer = name.rpartition(".")[0]
    key = f"{outer}.output.dense" if outer else "output.dense"
    try:
        layer = root.get_submodule(key)
    except AttributeError:
        return None
    return key if not near and _linear(layer) and inputs(layer) == width else None


def _problem(owner: nn.Module, join: str | None, split: set[str], prefix: str) -> str:
    if join is None:
        return f"whose layer that joins the heads has none of the names {', '.join(JOINS[:4])}, ..."
    others = [key for key, p in owner.named_parameters() if f"{prefix}{key}".rpartition(".")[0] not in split]
    return f"whose {others[0]} would get only some of the heads" if others else ""


def _heads(
    name: str, owner: nn.Module, projections: tuple[str, str, str], layers: dict[str, nn.Module]
) -> Attention | None:
    """Describe a module as an attention layer, with head counts from its attributes; None if they do not fit."""
    width, key_width = (_outputs(layers[key]) for key in projections[:2])
    heads_name = _attribute(owner, HEADS)
    if heads_name is not None:
        heads = getattr(owner, heads_name)
    else:
        dim_name = _attribute(owner, HEAD_DIMS)
        if dim_name is None:
            return None
        heads = width // getattr(owner, dim_name)
    if heads < 1 or width % heads:
        return None
    key_heads = key_width // (width // heads)
    counts = [key for key in (*HEADS, *KEY_HEADS) if _count(owner, key)]
    counts += [key for key in WIDTHS if getattr(owner, key, None) == width]
    norms = [
        f"{name}.{key}" if name else key
        for key, child in owner.named_children()
        if "norm" in key and all(p.shape == (width // heads,) for p in child.parameters()) and heads > 1
    ]
    return Attention(name, projections, heads, max(key_heads, 1), counts, norms)


def _attribute(owner: nn.Module, names: tuple[str, ...]) -> str | None:
    return next((key for key in names if _count(owner, key)), None)


def _count(owner: nn.Module, key: str) -> bool:
    value = getattr(owner, key, None)
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


# ---- small networks --------------------------------------------------------------------------------------------------


def _find_network(
    name: str, owner: nn.Module, layers: dict[str, nn.Module], size: int, found: SplittableLayers
) -> None:
    prefix = f"{name}." if name else ""
    taken = {*found.columns, *found.rows}
    for ups, down in _networks(name, owner):
        keys = [prefix + key for key in (*ups, down)]
        if any(key not in layers or key in taken for key in keys):
            continue
        width = inputs(layers[keys[-1]])
        if any(_outputs(layers[key]) != width for key in keys[:-1]):
            continue
        if width % size:
            found.not_split.append(f"{keys[0]} and {keys[-1]}, whose {width} features are not divisible by {size}")
            continue
        found.columns += keys[:-1]
        found.rows.append(keys[-1])
        taken.update(keys)
        if not isinstance(owner, nn.Sequential) and all(
            f"{prefix}{key}".rpartition(".")[0] in keys for key, _ in owner.named_parameters()
        ):
            found.networks.append(name)


def _networks(name: str, owner: nn.Module) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield pairs: the children of a module that get its input, and the child that computes its output."""
    if isinstance(owner, nn.Sequential):
        yield from _neighbors(owner)
        return
    layers = _layers(owner) if name else {}  # an entire model's forward may use its own layers in any way
    for ups, down in NETWORKS:
        if all(key in layers for key in (*ups, down)) and _nothing_between(owner, layers[ups[0]], (*ups, down)):
            yield ups, down
            return


def _neighbors(owner: nn.Sequential) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield pairs of successive linear layers in a Sequential with only featurewise functions between them."""
    kept = [(key, layer) for key, layer in owner.named_children() if not isinstance(layer, FEATUREWISE)]
    last = ""
    for (one, first), (other, second) in pairwise(kept):
        if one != last and _linear(first) and _linear(second):
            yield (one,), other
            last = other


def _nothing_between(owner: nn.Module, first: nn.Module, keys: tuple[str, ...]) -> bool:
    """Return True unless another child, whose weights have the hidden width, may need all hidden features."""
    width, outer = _outputs(first), inputs(first)
    for key, child in owner.named_children():
        if any(f"{name}.".startswith(f"{key}.") for name in keys) or isinstance(child, FEATUREWISE):
            continue
        if width != outer and any(width in p.shape for p in child.parameters()) and not _holds_attention(child):
            return False
        if isinstance(child, (nn.Softmax, nn.LogSoftmax, Convolution)):
            return False
    return True


def _holds_attention(child: nn.Module) -> bool:
    return any(
        key in PROJECTIONS or key in FUSED for _, layer in child.named_modules() for key, _ in layer.named_children()
    )
