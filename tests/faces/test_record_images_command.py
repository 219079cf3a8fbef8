"""`saev-store record --images` on a vision model and its processor in a folder: the store, masks, bad images, errors."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from kill_children import content
from photographs import noise, png, write_energon, write_folder
from tiny_models import D_MODEL, tiny_language, tiny_vision

from saev_store import ShardStore
from saev_store.cli import main

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
Image = pytest.importorskip("PIL.Image")

NAMES = ["a/0.png", "a/1.png", "b/2.png", "b/3.png", "c.png"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with its processor, as `save_pretrained` writes them, and five images."""
    folder = tmp_path_factory.mktemp("model")
    tiny_vision("ViTForImageClassification").save_pretrained(folder)
    transformers.ViTImageProcessorPil(size={"height": 32, "width": 32}).save_pretrained(folder)
    write_folder(folder / "images", {name: png(noise(i)) for i, name in enumerate(NAMES)})
    return folder


@pytest.fixture
def run(capfd, monkeypatch: pytest.MonkeyPatch):
    """The command in this process, which does not ask the hub: (exit code, standard output, standard error)."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)

    def call(*arguments: object) -> tuple[int, str, str]:
        code = main(["record", "--no-progress", *map(str, arguments)])
        out, err = capfd.readouterr()
        return code, out, err

    return call


def flags(folder: Path, root: Path) -> list[object]:
    return [
        "--model", folder, "--images", folder / "images", "--layers", "2,0", "--batch-size", 2, "--to", root,
        "--hook-points", "resid_pre",
    ]  # fmt: skip


def by_hand(folder: Path, seeds: list[int], batch_size: int) -> np.ndarray:
    """The states before blocks 2 and 0, (images, 2, tokens, d_model), of the model and the processor that the folder has."""
    model = transformers.AutoModel.from_pretrained(folder).eval()
    processor = transformers.AutoImageProcessor.from_pretrained(folder)
    found = []
    for first in range(0, len(seeds), batch_size):
        images = [Image.fromarray(noise(seed)) for seed in seeds[first : first + batch_size]]
        pixels = torch.cat([processor(images=[image], return_tensors="pt")["pixel_values"] for image in images])
        with torch.no_grad():
            states = model(pixels, output_hidden_states=True).hidden_states
        found.append(torch.stack([states[2], states[0]], dim=1).numpy())
    return np.concatenate(found)


def test_images_are_recorded_with_the_models_own_processor(run, folder: Path, tmp_path: Path) -> None:
    code, out, err = run(*flags(folder, tmp_path), "--json")
    assert code == 0, err
    found = json.loads(out)
    store = ShardStore.open(found["url"])
    assert found["shape"] == [5, 2, 17, D_MODEL]
    assert store[:].tobytes() == by_hand(folder, [0, 1, 2, 3, 4], 2).tobytes()
    assert (store.metadata.ckpt, store.metadata.dataset) == (folder.name, str(folder / "images"))
    for example, name in enumerate(NAMES):
        origin = store.origin(example, 5)
        assert (origin.key, origin.place.original_box) == (name, pytest.approx((7.5, 5.0, 15.0, 10.0)))
        np.testing.assert_array_equal(origin.sample, noise(example))
    code, out, err = run(*flags(folder, tmp_path))
    assert (code, out.strip()) == (0, store.url)
    assert err.endswith(f"recorded nothing: all examples were there, at {store.url}\n")
    code, out, _ = run(*flags(folder, tmp_path), "--dry-run")
    assert (code, "5 examples" in out) == (0, True)


def test_options_for_images_come_from_a_file(run, folder: Path, tmp_path: Path) -> None:
    masks = {name: np.where(noise(i, 20, 30)[..., 0] > 127, 7, 255).astype(np.uint8) for i, name in enumerate(NAMES)}
    write_folder(tmp_path / "masks", {name: png(mask) for name, mask in masks.items()})
    config = tmp_path / "dump.toml"
    config.write_text(
        f'model = "{folder}"\nimages = "{folder}/images"\nmasks = "{tmp_path}/masks"\nto = "{tmp_path / "a"}"\n'
        f'layers = [2, 0]\nbatch_size = 2\nhook_points = ["resid_pre"]\nprocessor = "{folder}"\non_bad_image = "skip"\n'
    )
    code, out, err = run("--config", config)
    assert code == 0, err
    by_flags = run(*flags(folder, tmp_path / "b"), "--masks", tmp_path / "masks")
    stores = [ShardStore.open(out.strip()), ShardStore.open(by_flags[1].strip())]
    assert stores[0].metadata == stores[1].metadata  # no image was bad
    assert [store[:].tobytes() for store in stores] == [by_hand(folder, [0, 1, 2, 3, 4], 2).tobytes()] * 2
    for example, mask in enumerate(masks.values()):
        small = np.asarray(Image.fromarray(mask).resize((32, 32), Image.Resampling.NEAREST))
        patches = small.reshape(4, 8, 4, 8).swapaxes(1, 2).reshape(16, 64)
        truth = [min(value for value, n in Counter(patch).items() if n == max(Counter(patch).values())) for patch in patches.tolist()]  # fmt: skip
        assert stores[0].labels[example].tolist() == truth


def test_bad_images_are_named_and_left_out_only_when_that_is_asked_for(run, folder: Path, tmp_path: Path) -> None:
    bad = {"a/1.png": png(noise(1))[:60], "c.png": b""}
    images = write_folder(tmp_path / "images", {name: png(noise(i)) for i, name in enumerate(NAMES)} | bad)
    options = flags(folder, tmp_path / "root")
    options[3] = images
    code, out, err = run(*options)
    assert (code, out) == (1, ""), err
    assert "a/1.png: it is no image that can be decoded: " in err
    assert "--on-bad-image skip leaves out images that do not decode." in err
    assert not list((tmp_path / "root").rglob("shards.json"))
    code, out, err = run(*options, "--on-bad-image", "skip")
    assert code == 0, err
    assert "2 of 5 images do not decode" in err
    assert "a/1.png" in err
    assert "c.png: it is no image that can be decoded: its format is not known" in err
    store = ShardStore.open(out.strip())
    assert store[:].tobytes() == by_hand(folder, [0, 2, 3], 2).tobytes()
    assert [store.origin(example).key for example in range(3)] == ["a/0.png", "b/2.png", "b/3.png"]
    assert store.metadata.data["examples"] == {"first": 0, "skipped": [1, 4]}


def test_of_a_bad_mask_the_masks_own_file_is_named(run, folder: Path, tmp_path: Path) -> None:
    masks = {name: png(noise(i, 20, 30)[..., 0]) for i, name in enumerate(NAMES)} | {"b/2.png": b"no mask"}
    write_folder(tmp_path / "masks", masks)
    code, _, err = run(*flags(folder, tmp_path / "root"), "--masks", tmp_path / "masks")
    said = f"error: {tmp_path}/masks/b/2.png: it is no image that can be decoded: its format is not known\n"
    assert (code, err.endswith(said)) == (1, True), err


def test_the_image_of_an_energon_sample(run, folder: Path, tmp_path: Path) -> None:
    parts = [(f"s{i}.{side}.png", png(noise(i + j))) for i in range(2) for j, side in enumerate(["left", "right"])]
    options = flags(folder, tmp_path / "root")
    options[3] = write_energon(tmp_path / "tars", [parts])
    code, out, err = run(*options, "--image-key", "right.png")
    assert code == 0, err
    assert ShardStore.open(out.strip())[:].tobytes() == by_hand(folder, [1, 2], 2).tobytes()
    code, _, err = run(*options)
    assert (code, "--image-key: " in err and "left.png, right.png" in err) == (2, True), err


def test_of_a_model_with_two_towers_the_one_for_images_is_recorded(run, folder: Path, tmp_path: Path) -> None:
    sides = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_hidden_layers": 3}
    config = transformers.CLIPConfig(
        text_config={**sides, "vocab_size": 50}, vision_config={**sides, "image_size": 32, "patch_size": 8}
    )
    torch.manual_seed(3)
    clip = transformers.CLIPModel(config).eval()
    clip.save_pretrained(tmp_path / "clip")
    options = flags(tmp_path / "clip", tmp_path / "root")
    options[3] = folder / "images"
    code, _, err = run(*options)
    assert (code, "it could not be loaded" in err) == (1, True), err  # this folder has no processor
    code, out, err = run(*options, "--processor", folder)
    assert code == 0, err
    processor = transformers.AutoImageProcessor.from_pretrained(folder)
    seen = processor(images=[Image.fromarray(noise(0))], return_tensors="pt")["pixel_values"]
    with torch.no_grad():
        states = clip.vision_model(seen, output_hidden_states=True).hidden_states
    found = ShardStore.open(out.strip())[0]
    np.testing.assert_allclose(found, torch.stack([states[2][0], states[0][0]]).numpy(), rtol=2e-5, atol=2e-6)


def test_a_model_whose_files_lack_weights_is_refused(run, folder: Path, tmp_path: Path) -> None:
    """Transformers would draw random numbers for them, and only log it. What a file without a pooler gives is tested above."""
    from safetensors.torch import load_file, save_file

    for path in folder.glob("*.json"):
        write_folder(tmp_path / "model", {path.name: path.read_bytes()})
    weights = load_file(folder / "model.safetensors")
    assert not any("pooler" in name for name in weights)
    lost = next(name for name in weights if "layer.1." in name or "layers.1." in name)
    save_file({name: value for name, value in weights.items() if name != lost}, tmp_path / "model/model.safetensors")
    code, _, err = run(*flags(folder, tmp_path / "root"), "--model", tmp_path / "model")
    assert (code, "its files have no weights for" in err and "layers.1." in err) == (1, True), err


def test_a_model_of_texts_is_not_run_on_images(run, folder: Path, tmp_path: Path) -> None:
    tiny_language("Qwen3ForCausalLM").save_pretrained(tmp_path / "qwen")
    said = f"error: {tmp_path / 'qwen'}: qwen3 is a model of texts. Record texts with it: --text … or --tokens ….\n"
    for processor in ([], ["--processor", folder]):
        code, _, err = run(*flags(folder, tmp_path / "root"), "--model", tmp_path / "qwen", *processor)
        assert (code, err.endswith(said)) == (2, True), err


@pytest.mark.parametrize(
    ("changes", "code", "said"),
    [
        (["--images", "missing"], 1, "missing: "),
        (["--model", "missing/model"], 1, "missing/model: it could not be loaded"),
        (["--processor", "missing/model"], 1, "missing/model: it could not be loaded"),
        (["--masks", "missing"], 1, "missing"),
        (["--on-bad-image", "keep"], 2, "keep"),
        (["--image-key", "jpg"], 2, "images is a folder of images; only samples of Energon have parts. Leave it out."),
        (["--batch-size", "0"], 2, "--batch-size: batch_size is 0"),
        (["--layers", "3"], 2, "--layers: layer 3 is not a block"),
        (["--text", "x.jsonl"], 2, "--text, --tokens, --images: one of the three is needed, and only one"),
        (["--context", "4"], 2, "--context: context is an option for texts. Leave it out."),
        (["--pack", "--layout", "stream"], 2, "--layout, --pack: layout is an option for texts"),
        (["--attention", "foo"], 2, "--attention: 'foo' cannot be used"),
    ],
)
def test_mistakes_have_exit_codes_and_name_their_option(
    run, folder: Path, tmp_path: Path, changes: list, code: int, said: str
) -> None:
    found, out, err = run(*flags(folder, tmp_path), *changes)
    assert (found, out, said in err) == (code, "", True), err
    assert not list(tmp_path.rglob("metadata.json"))


def test_options_for_images_are_refused_for_texts(run, folder: Path, tmp_path: Path) -> None:
    texts = ["--model", folder, "--text", "x.jsonl", "--layers", "0", "--to", tmp_path]
    for option in ("masks", "processor", "image-key"):
        code, _, err = run(*texts, "--context", 4, f"--{option}", "x")
        assert (code, f"--{option}: {option.replace('-', '_')} is an option for images" in err) == (2, True), err
    code, _, err = run(*texts)
    assert (code, "--context: texts need it" in err) == (2, True), err


def test_what_is_wrong_with_images_is_refused_before_the_model_is_loaded(
    run, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("saev_store.record.load_vision_model", lambda *_, **__: pytest.fail("a model was loaded"))
    for changes in (["--images", tmp_path / "missing"], ["--batch-size", 0], ["--masks", tmp_path / "missing"]):
        assert run(*flags(folder, tmp_path), *changes)[0] in {1, 2}


def test_repair_takes_the_options_for_images(run, folder: Path, tmp_path: Path, capfd) -> None:
    """A shard of three, and the labels, which come from masks."""
    write_folder(tmp_path / "masks", {name: png(noise(i, 20, 30)[..., 0]) for i, name in enumerate(NAMES)})
    config = tmp_path / "dump.toml"
    config.write_text(
        f'model = "{folder}"\nimages = "{folder}/images"\nmasks = "{tmp_path}/masks"\nto = "{tmp_path / "a"}"\n'
        f"layers = [2, 0]\nbatch_size = 2\nmax_tokens_per_shard = {17 * 2 * 2}\n"
    )
    code, out, err = run("--config", config)
    assert code == 0, err
    path = Path(out.strip())
    whole = content(path)
    (path / "acts000001.bin").unlink()
    (path / "labels.bin").unlink()
    assert main(["repair", str(path), "--config", str(config), "--no-progress"]) == 0
    lines = ["labels.bin: written anew; the bytes of before", "acts000001.bin: examples 2 to 3; the bytes of before"]
    assert capfd.readouterr().out.splitlines() == lines
    assert content(path) == whole
