"""`Recorder` on language models: every class of `transformers` against its own hidden states and against hooks of the test."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tiny_models import D_MODEL, LANGUAGE_CLASSES, LONGEST, N_LAYERS, VOCABULARY, tiny_language

from saev_store import ShardStore
from saev_store.errors import ArgumentError, LayerNotFoundError
from saev_store.record import HookPoint, Recorder, TextAdapter, Texts, adapt, record

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

#: In each class of blocks: the module whose output attention adds to the stream, and that of the MLP.
BRANCHES = {
    "GPT2Block": ("attn", "mlp"),
    "GPTNeoXLayer": ("attention", "mlp"),
    "Gemma2DecoderLayer": ("post_attention_layernorm", "post_feedforward_layernorm"),
    "Gemma3DecoderLayer": ("post_attention_layernorm", "post_feedforward_layernorm"),
    "Olmo2DecoderLayer": ("post_attention_layernorm", "post_feedforward_layernorm"),
    "Olmo3DecoderLayer": ("post_attention_layernorm", "post_feedforward_layernorm"),
}
POINTS = ("resid_pre", "mlp_out", "resid_post", "attn_out")


def padded_ids() -> tuple[torch.Tensor, torch.Tensor]:
    """Four rows of 9, 1, 4 and 9 tokens, padded on the right, and their mask."""
    ids = torch.from_numpy(np.random.default_rng(1).integers(3, VOCABULARY, (4, 9)))
    mask = torch.arange(9) < torch.tensor([[9], [1], [4], [9]])
    return ids * mask, mask


def captured(model: torch.nn.Module, ids: torch.Tensor, mask: torch.Tensor) -> dict[tuple[int, str], torch.Tensor]:
    """The oracle: hidden states as transformers gives them, and outputs of modules as hooks of the test see them."""
    found: dict[tuple[int, str], torch.Tensor] = {}
    blocks = blocks_of(model)
    handles = []
    for depth, block in enumerate(blocks):
        branches = BRANCHES.get(type(block).__name__, ("self_attn", "mlp"))
        for point, name in zip(("attn_out", "mlp_out"), branches, strict=True):

            def keep(_module, _args, out, key=(depth, point)):
                found[key] = (out[0] if isinstance(out, tuple) else out).clone()

            handles.append(getattr(block, name).register_forward_hook(keep))
    handles.append(
        blocks[-1].register_forward_hook(lambda _m, _a, out: found.__setitem__((N_LAYERS - 1, "resid_post"), out))
    )
    with torch.no_grad():
        states = model(input_ids=ids, attention_mask=mask.long(), output_hidden_states=True).hidden_states
    for handle in handles:
        handle.remove()
    assert len(states) == N_LAYERS + 1
    found |= {(depth, "resid_pre"): states[depth] for depth in range(N_LAYERS)}
    found |= {
        (depth, "resid_post"): states[depth + 1] for depth in range(N_LAYERS - 1)
    }  # the last state is behind the final norm
    return found


def n_hooks(model: torch.nn.Module) -> int:
    return sum(len(vars(m)["_forward_hooks"]) + len(vars(m)["_forward_pre_hooks"]) for m in model.modules())


def blocks_of(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The blocks, by the names that their class has for them."""
    kinds = "GPT2Block", "GPTNeoXLayer"
    return [m for m in model.modules() if type(m).__name__ in kinds or type(m).__name__.endswith("DecoderLayer")]


@pytest.mark.parametrize("name", LANGUAGE_CLASSES)
def test_every_hook_point_is_what_the_model_itself_computes(name: str) -> None:
    model = tiny_language(name)
    ids, mask = padded_ids()
    expected = captured(model, ids, mask)
    before = n_hooks(model)  # transformers leaves some
    with Recorder(model, layers=(2, 0, -2), hook_points=POINTS) as recorder:
        acts = recorder(ids, mask)
    assert n_hooks(model) == before
    assert recorder.axis == tuple((label, point) for label in (2, 0, -2) for point in POINTS)
    assert acts.shape == (4, 12, 9, D_MODEL)
    for slot, (label, point) in enumerate(recorder.axis):
        assert torch.equal(acts[:, slot], expected[label % N_LAYERS, point]), (label, point)


@pytest.mark.parametrize(
    "name",
    ["GPT2Model", "LlamaModel", "Qwen3Model", "Gemma2Model", "Gemma3TextModel", "Olmo2Model"]
    + ["MinistralModel", "MixtralModel", "Qwen2MoeModel", "Qwen3MoeModel", "OlmoeModel"],
)
def test_the_stream_is_the_sum_of_what_is_added_to_it(name: str) -> None:
    points = ("resid_pre", "attn_out", "resid_mid", "mlp_out", "resid_post")
    with Recorder(tiny_language(name), layers=range(N_LAYERS), hook_points=points) as recorder:
        acts = recorder(*padded_ids())
    for depth in range(N_LAYERS):
        before, attention, between, mlp, after = acts[:, 5 * depth : 5 * depth + 5].unbind(1)
        assert torch.equal(before + attention, between)
        assert torch.equal(between + mlp, after)
        assert not torch.equal(before, after)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", ["GPT2Model", "Gemma2Model", "Qwen3ForCausalLM"])
def test_vectors_come_in_the_dtype_of_the_computation(name: str, dtype: str) -> None:
    model = tiny_language(name).to(getattr(torch, dtype))
    ids, mask = padded_ids()
    expected = captured(model, ids, mask)
    with Recorder(model, layers=(1,), hook_points=POINTS) as recorder:
        acts = recorder(ids, mask)
    assert acts.dtype == getattr(torch, dtype)
    for slot, point in enumerate(POINTS):
        assert torch.equal(acts[:, slot], expected[1, point])


@pytest.mark.parametrize("name", ["GPT2Model", "GPTNeoXModel", "MistralModel", "Gemma3TextModel"])
def test_padding_on_the_right_changes_no_token(name: str) -> None:
    """But for rounding: products over other shapes add in another order."""
    ids, mask = padded_ids()
    with Recorder(tiny_language(name), layers=(2,)) as recorder:
        together = recorder(ids, mask)
        for row, n in zip(range(4), mask.sum(1).tolist(), strict=True):
            torch.testing.assert_close(recorder(ids[row : row + 1, :n])[0], together[row, :, :n], rtol=1e-4, atol=1e-5)


def test_what_an_adapter_knows_of_a_language_model() -> None:
    adapter = adapt(tiny_language("Gemma3ForConditionalGeneration"))
    assert isinstance(adapter, TextAdapter)
    assert (adapter.family, adapter.d_model, len(adapter.blocks)) == ("gemma3", D_MODEL, N_LAYERS)
    assert (adapter.vocabulary_size, adapter.max_tokens) == (VOCABULARY, LONGEST)
    assert adapt(adapter) is adapter
    head_free = adapt(tiny_language("LlamaForCausalLM"))
    assert type(head_free.model).__name__ == "LlamaModel"


class Foreign(torch.nn.Module):
    """A model of no library: an embedding, and blocks in a list of its own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embedding = torch.nn.Embedding(VOCABULARY, D_MODEL)
        self.steps = torch.nn.ModuleDict(
            {name: torch.nn.Sequential(torch.nn.Linear(D_MODEL, D_MODEL), torch.nn.Tanh()) for name in "ab"}
        )

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(ids)
        for step in self.steps.values():
            hidden = hidden + step(hidden)
        return hidden


def test_a_module_of_another_library_through_a_list_of_blocks() -> None:
    model = Foreign()
    points = {"mlp_pre": HookPoint("0"), "mlp_out": HookPoint("1"), "in": HookPoint("", "input")}
    adapter = TextAdapter(model=model, blocks=[model.steps["a"], model.steps["b"]], d_model=D_MODEL, points=points)
    ids, _ = padded_ids()
    with Recorder(adapter, layers=(1, 0), hook_points=("mlp_out", "in", "mlp_pre")) as recorder:
        acts = recorder(ids)
    with torch.no_grad():
        streams = [model.embedding(ids)]
        streams.append(streams[0] + model.steps["a"](streams[0]))
        for first, depth in ((0, 1), (3, 0)):
            step = model.steps["ab"[depth]]
            assert torch.equal(acts[:, first], step(streams[depth]))
            assert torch.equal(acts[:, first + 1], streams[depth])
            assert torch.equal(acts[:, first + 2], step[0](streams[depth]))


def test_blocks_that_are_not_the_models() -> None:
    with pytest.raises(ArgumentError, match="block 0 .Linear. is no module of the model"):
        TextAdapter(model=Foreign(), blocks=[torch.nn.Linear(2, 2)], d_model=D_MODEL)
    with pytest.raises(ArgumentError, match="^blocks: blocks is empty"):
        TextAdapter(model=Foreign(), blocks=[], d_model=D_MODEL)


@pytest.mark.parametrize(
    ("points", "match"),
    [
        ((), "at least one name"),
        ("resid_pre", "list of at least one name"),
        (("resid_pre", "resid_pre"), "is named twice"),
        (
            ("attention_out",),
            "not a hook point of LlamaDecoderLayer, which has attn_out, mlp_out, resid_mid, resid_post, resid_pre",
        ),
    ],
)
def test_hook_points_that_do_not_exist(points: tuple, match: str) -> None:
    with pytest.raises(ArgumentError, match=match):
        Recorder(tiny_language("LlamaModel"), layers=(0,), hook_points=points)


@pytest.mark.parametrize("layers", [0, None, 1.5])
def test_layers_that_are_no_list(layers: object) -> None:
    with pytest.raises(ArgumentError, match=f"layers is {layers}; it must be a list of integers"):
        Recorder(tiny_language("GPT2Model"), layers=layers)


def test_layers_that_do_not_exist() -> None:
    with pytest.raises(LayerNotFoundError, match="which has 3"):
        Recorder(tiny_language("GPT2Model"), layers=(3,))


@pytest.mark.parametrize(
    ("batch", "match"),
    [
        ([[1, 2], [3]], "no array of numbers"),
        ([1, 2], r"must be \(batch, tokens\)"),
        (np.zeros((0, 4), np.int64), "at least one of each"),
        (np.ones((2, 4), np.float32), "token ids are integers"),
        ([[1, VOCABULARY]], "token id 61; the model's embedding has those from 0 to 60"),
        ([[1, -1]], "token id -1"),
        ("text", "no array of numbers"),
    ],
)
def test_what_is_no_batch_of_tokens(batch: object, match: str) -> None:
    with Recorder(tiny_language("GPT2Model"), layers=(0,)) as recorder, pytest.raises(ArgumentError, match=match):
        recorder(batch)


def test_models_whose_blocks_cannot_be_told() -> None:
    model = tiny_language("LlamaModel")
    model.config.num_hidden_layers = 5
    with pytest.raises(ArgumentError, match="0 lists of 5 modules"):
        adapt(model)
    model.config.num_hidden_layers = 0
    with pytest.raises(ArgumentError, match="no positive integer config.num_hidden_layers"):
        adapt(model)
    for other in (None, "gpt2", torch.zeros(2)):
        with pytest.raises(ArgumentError, match="is no torch module"):
            adapt(other)


def test_what_a_model_itself_refuses_is_an_error_of_ours() -> None:
    model = tiny_language("LlamaModel")
    model.layers[1].mlp.up_proj = torch.nn.Linear(3, 3)
    with (
        Recorder(model, layers=(0,)) as recorder,
        pytest.raises(ArgumentError, match=r"refuses a batch of shape \(1, 2\)"),
    ):
        recorder([[1, 2]])


def test_a_mask_of_another_shape() -> None:
    with (
        Recorder(tiny_language("GPT2Model"), layers=(0,)) as recorder,
        pytest.raises(ArgumentError, match="attention_mask"),
    ):
        recorder([[1, 2]], [[True]])


def test_a_model_of_two_towers_is_refused() -> None:
    config = transformers.CLIPConfig(text_config={"num_hidden_layers": 1}, vision_config={"num_hidden_layers": 1})
    with torch.device("meta"):
        model = transformers.CLIPModel(config)
    with pytest.raises(ArgumentError, match="a tower for images and one for texts"):
        adapt(model)


# -- stores ------------------------------------------------------------------------------------------------------------

LENGTHS = (5, 1, 9, 3, 7, 2, 4)
CONTEXT, BOS = 6, 1
DOCUMENTS = [np.random.default_rng(n).integers(3, VOCABULARY, n) for n in LENGTHS]
#: What the model sees: contexts of one document each.
ROWS = [ids[at : at + CONTEXT] for ids in DOCUMENTS for at in range(0, len(ids), CONTEXT)]


def batches_of(size: int, *, bos: bool) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Token ids and mask of each batch, BOS in front, padded up to its longest row."""
    found = []
    for at in range(0, len(ROWS), size):
        rows = [[BOS] * bos + row.tolist() for row in ROWS[at : at + size]]
        longest = max(map(len, rows))
        ids = torch.tensor([row + [0] * (longest - len(row)) for row in rows])
        found.append((ids, torch.arange(longest) < torch.tensor([[len(row)] for row in rows])))
    return found


def check_store(store: ShardStore, model: torch.nn.Module, size: int, *, bos: bool) -> None:
    """Every bit of a store of `ROWS` is the model's own, and padding is zeros."""
    example = 0
    for ids, mask in batches_of(size, bos=bos):
        expected = captured(model, ids, mask)
        expected |= {
            (depth, "resid_mid"): expected[depth, "resid_pre"] + expected[depth, "attn_out"]
            for depth in range(N_LAYERS)
        }
        found = torch.from_numpy(store[example : example + len(ids)])
        for slot, key in enumerate(store.layout.layer_keys):
            wanted = torch.zeros(found[:, slot].shape)
            wanted[:, : ids.shape[1]] = expected[key[0] % N_LAYERS, key[1]].float() * mask[..., None]
            assert torch.equal(found[:, slot], wanted), (example, key)
        example += len(ids)
    assert example == len(store)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("name", [name for name in LANGUAGE_CLASSES if name.endswith("Model") and "LMHead" not in name])
def test_a_store_of_every_family_in_every_dtype(tmp_path: Path, name: str, dtype: str) -> None:
    model = tiny_language(name).to(getattr(torch, dtype))
    points = [
        point
        for point in ("mlp_out", "resid_post", "resid_mid", "attn_out", "resid_pre")
        if point in adapt(model).points
    ]
    store = record(
        model, Texts(DOCUMENTS, context=CONTEXT, bos=BOS, batch_size=4), tmp_path, layers=(2, 0, -2), hook_points=points,
        ckpt="tiny", progress=False, max_tokens_per_shard=4 * 3 * len(points) * (CONTEXT + 1),
    )  # fmt: skip
    assert store.metadata.dtype == dtype
    assert (len(store), store.layout.n_shards) == (len(ROWS), 3)
    check_store(store, model, 4, bos=True)


@pytest.mark.parametrize("bos", [True, False])
@pytest.mark.parametrize("size", [1, 2, 5, 7, 64])
@pytest.mark.parametrize("layers", [(0, 1, 2), (-1, 0), (1,)], ids=str)
def test_batch_sizes_that_divide_nothing_and_every_order_of_layers(
    tmp_path: Path, llama: torch.nn.Module, layers: tuple[int, ...], size: int, *, bos: bool
) -> None:
    source = Texts(DOCUMENTS, context=CONTEXT, bos=BOS if bos else None, batch_size=size)
    store = record(llama, source, tmp_path, layers=layers, hook_points=POINTS, ckpt="tiny", progress=False)
    assert [key[0] for key in store.layout.layer_keys] == [layer for layer in layers for _ in POINTS]
    check_store(store, llama, size, bos=bos)


@pytest.fixture(scope="module")
def llama() -> torch.nn.Module:
    return tiny_language("LlamaModel").bfloat16()
