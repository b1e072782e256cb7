"""Pipelines of diffusers in less memory than their weights: the same images, and nothing that no module announced."""

import contextlib
import copy
import io
import json
import os
import pickle
import re
import shutil
import tempfile
import unittest
import warnings
from pathlib import Path

try:
    import diffusers
except ImportError as cause:
    raise unittest.SkipTest(f"diffusers is not installed: no pipeline was offloaded ({cause})") from cause
import torch
import transformers
from safetensors.torch import load_file, save_file

import outcore
from test_torch import PAGE, Refused, as_in

PROMPT = "a cat on a mat"
DOCS = Path(__file__).resolve().parents[3] / "docs"


def setUpModule():
    global FOLDER
    FOLDER = tempfile.TemporaryDirectory()
    diffusers.utils.logging.disable_progress_bar()
    diffusers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    warnings.simplefilter("ignore")


def tearDownModule():
    FOLDER.cleanup()


def clip(**options):
    config = transformers.CLIPTextConfig(
        vocab_size=600, hidden_size=128, intermediate_size=256, num_hidden_layers=3, num_attention_heads=4,
        max_position_embeddings=77, projection_dim=64, bos_token_id=0, eos_token_id=1, pad_token_id=1, **options,
    )
    return transformers.CLIPTextModel(config)


def t5():
    config = transformers.T5Config(
        vocab_size=600, d_model=128, d_kv=32, d_ff=512, num_layers=4, num_heads=4, feed_forward_proj="gated-gelu",
        pad_token_id=0, eos_token_id=1, decoder_start_token_id=0,
    )
    return transformers.T5EncoderModel(config)


def clip_tokenizer():
    letters = [chr(code) for code in range(ord("a"), ord("z") + 1)]
    words = ["<|startoftext|>", "<|endoftext|>", *letters, *(letter + "</w>" for letter in letters)]
    return transformers.CLIPTokenizer(
        vocab={word: at for at, word in enumerate(words)}, merges=[], model_max_length=77
    )


def t5_tokenizer():
    letters = [chr(code) for code in range(ord("a"), ord("z") + 1)]
    words = ["<pad>", "</s>", "<unk>", "\u2581", *letters]
    vocab = [(word, -float(at)) for at, word in enumerate(words)]
    return transformers.T5TokenizerFast(vocab=vocab, extra_ids=0, model_max_length=512)


def vae(**options):
    return diffusers.AutoencoderKL(
        in_channels=3, out_channels=3, down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4, block_out_channels=(32, 32, 64, 64), layers_per_block=1,
        latent_channels=4, norm_num_groups=8, sample_size=32, scaling_factor=0.4, **options,
    )


def flux():
    transformer = diffusers.FluxTransformer2DModel(
        patch_size=1, in_channels=16, num_layers=2, num_single_layers=4, attention_head_dim=32, num_attention_heads=4,
        joint_attention_dim=128, pooled_projection_dim=128, axes_dims_rope=(8, 12, 12),
    )
    return diffusers.FluxPipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(), vae=vae(shift_factor=0.06, use_quant_conv=False,
        use_post_quant_conv=False), text_encoder=clip(), tokenizer=clip_tokenizer(), text_encoder_2=t5(),
        tokenizer_2=t5_tokenizer(), transformer=transformer,
    )


def stable_diffusion():
    unet = diffusers.UNet2DConditionModel(
        block_out_channels=(64, 128), layers_per_block=1, sample_size=16, in_channels=4, out_channels=4,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"), up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        cross_attention_dim=128, norm_num_groups=8, attention_head_dim=4,
    )
    return diffusers.StableDiffusionPipeline(
        vae=vae(), text_encoder=clip(), tokenizer=clip_tokenizer(), unet=unet, scheduler=diffusers.DDIMScheduler(),
        safety_checker=None, feature_extractor=None, image_encoder=None, requires_safety_checker=False,
    )


PIPELINES = {"flux": flux, "stable-diffusion": stable_diffusion}
# How much memory there is for each: less than its largest module takes.
MEMORY = {"flux": 40 * PAGE, "stable-diffusion": 40 * PAGE}


def varied(model):
    """Weights that are not all alike: norms begin as ones, and some layers as zeros."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return model


def folder(name):
    """The folder of a small pipeline with random weights."""
    path = os.path.join(FOLDER.name, name)
    if not os.path.exists(path):
        torch.manual_seed(2)
        pipeline = PIPELINES[name]()
        for one in modules(pipeline).values():
            varied(one)
        pipeline.save_pretrained(path, max_shard_size="5MB")
    return path


def modules(pipeline):
    return {name: one for name, one in pipeline.components.items() if isinstance(one, torch.nn.Module)}


def offload(model, memory, **options):
    return outcore.torch.offload(model, memory, page_size=PAGE, quiet=True, **options)


def resident(name, like):
    """The pipeline with all weights in memory, aligned as in the offloaded one."""
    kind = type(like)
    pipeline = kind.from_pretrained(folder(name))
    for component, one in modules(pipeline).items():
        as_in(like.components[component], one)
    return pipeline


def image(pipeline, output_type="latent", steps=3, **options):
    pipeline.set_progress_bar_config(disable=True)
    options = {"prompt": PROMPT, "height": 64, "width": 64, "num_inference_steps": steps, **options}
    generator = torch.Generator().manual_seed(5)
    found = pipeline(output_type=output_type, generator=generator, **options).images
    return torch.as_tensor(found)


class Bits(unittest.TestCase):
    def same(self, name):
        pipeline = offload(folder(name), MEMORY[name], check=True)
        expected = resident(name, pipeline)
        weights = sum(Path(file).stat().st_size for file in Path(folder(name)).rglob("*.safetensors"))
        self.assertGreater(weights, 2 * MEMORY[name])
        images = {kind: image(expected, kind) for kind in ("latent", "np")}
        self.assertGreater(images["np"].std(), 0.01)
        for at in range(3):
            if at == 1:
                before = pipeline.outcore.numbers()["unannounced"]
            for kind, wanted in images.items():
                self.assertTrue(torch.equal(image(pipeline, kind), wanted), f"{name}, image {at + 1} of {kind}")
        numbers = pipeline.outcore.numbers()
        self.assertEqual(numbers["unannounced"] - before, 0, numbers["unannounced_names"])
        self.assertLessEqual(numbers["memory_peak"], MEMORY[name])
        self.assertEqual(numbers["groups_refused"], 0)
        pipeline.outcore.close()
        # Without leaving at once, in the order that was declared.
        pipeline = offload(folder(name), MEMORY[name])
        for kind, wanted in [*images.items()] * 2:
            self.assertTrue(torch.equal(image(pipeline, kind), wanted), kind)
        self.assertLessEqual(pipeline.outcore.numbers()["memory_peak"], MEMORY[name])
        pipeline.outcore.close()

    def test_flux(self):
        self.same("flux")

    def test_stable_diffusion(self):
        self.same("stable-diffusion")

    def test_modules_that_are_not_in_use_give_their_memory(self):
        pipeline = offload(folder("flux"), MEMORY["flux"])
        sizes = {name: sum(tensor.nbytes for tensor in one.named.values())
                 for name, one in pipeline.outcore.components.items()}
        pipeline.outcore.close()
        # The transformer has room, but not with anything else besides.
        memory = (sizes["transformer"] // PAGE + 20) * PAGE
        self.assertGreater(sizes["text_encoder_2"], 40 * PAGE)
        pipeline = offload(folder("flux"), memory)
        wanted = image(resident("flux", pipeline), steps=4)
        reads = []

        def step_ends(_, step, time, values):
            reads.append(pipeline.outcore.numbers()["read_bytes"])
            return values

        for _ in range(2):
            reads[:] = [pipeline.outcore.numbers()["read_bytes"]]
            self.assertTrue(torch.equal(image(pipeline, steps=4, callback_on_step_end=step_ends), wanted))
            of_steps = [after - before for before, after in zip(reads, reads[1:])]
            # The text encoders and the first step read. From then on all of the transformer is in memory.
            self.assertGreater(of_steps[0], sizes["text_encoder_2"] // 2)
            self.assertEqual(of_steps[1:], [0, 0, 0])
        self.assertLessEqual(pipeline.outcore.numbers()["memory_peak"], memory)
        pipeline.outcore.close()

    def test_a_pipeline_that_was_constructed_without_weights(self):
        with outcore.torch.without_weights():
            empty = flux()
        kept = {name: list(one.parameters()) for name, one in modules(empty).items()}
        # What could not be offloaded is as it was, and can be.
        with Refused(self, "budget_too_small", "transformer", "pages"):
            offload(empty, 8 * PAGE, folder=folder("flux"))
        for name, one in modules(empty).items():
            self.assertTrue(all(now is before for now, before in zip(one.parameters(), kept[name], strict=True)))
            self.assertFalse(hasattr(one, "outcore"))
        self.assertFalse(hasattr(empty, "outcore"))
        pipeline = offload(empty, MEMORY["flux"], folder=folder("flux"))
        self.assertIs(pipeline, empty)
        self.assertTrue(torch.equal(image(pipeline), image(resident("flux", pipeline))))
        with Refused(self, "invalid_argument", "already"):
            offload(pipeline, MEMORY["flux"], folder=folder("flux"))
        pipeline.outcore.close()
        with Refused(self, "closed", "construct a new pipeline"):
            offload(pipeline, MEMORY["flux"], folder=folder("flux"))

    def test_a_pipeline_without_some_components(self):
        path = os.path.join(FOLDER.name, "without")
        shutil.copytree(folder("flux"), path)
        file = Path(path, "model_index.json")
        absent = dict.fromkeys(("text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2"), [None, None])
        file.write_text(json.dumps({**json.loads(file.read_text()), **absent}))
        pipeline = offload(path, MEMORY["flux"])
        self.assertEqual(list(pipeline.outcore.components), ["transformer", "vae"])
        self.assertIsNone(pipeline.tokenizer)
        prompt = {"prompt": None, "prompt_embeds": hidden(1, 9, 128), "pooled_prompt_embeds": hidden(1, 128)}
        wanted = resident("flux", offload(folder("flux"), MEMORY["flux"]))
        for name, one in modules(pipeline).items():
            as_in(one, wanted.components[name])
        self.assertTrue(torch.equal(image(pipeline, **prompt), image(wanted, **prompt)))
        pipeline.outcore.close()

    def test_a_vae_is_used_by_its_parts(self):
        path = os.path.join(folder("stable-diffusion"), "vae")
        model = offload(path, 24 * PAGE, check=True)
        expected = as_in(model, diffusers.AutoencoderKL.from_pretrained(path))
        latents, pixels = hidden(1, 4, 8, 8), hidden(1, 3, 64, 64)
        with torch.no_grad():
            self.assertTrue(torch.equal(model.decode(latents).sample, expected.decode(latents).sample))
            self.assertTrue(model.outcore.first)
            before = model.outcore.numbers()["unannounced"]
            for _ in range(2):
                self.assertTrue(torch.equal(model.decode(latents).sample, expected.decode(latents).sample))
            # What encodes is no part of the order, until it is used too.
            self.assertFalse(model.outcore.first)
            self.assertEqual(model.outcore.order[0], "post_quant_conv")
            self.assertFalse([name for name in model.outcore.order if name.startswith("encoder")])
            for _ in range(2):
                found, wanted = (of.encode(pixels).latent_dist.mean for of in (model, expected))
                self.assertTrue(torch.equal(found, wanted))
            self.assertTrue([name for name in model.outcore.order if name.startswith("encoder")])
            for of in (model, expected):
                of.enable_tiling()
                of.tile_latent_min_size, of.tile_sample_min_size = 4, 32
            self.assertTrue(torch.equal(model.decode(latents).sample, expected.decode(latents).sample))
        self.assertEqual(model.outcore.numbers()["unannounced"], before)
        model.outcore.close()


# Small models of classes of all kinds, each with the inputs of a pass.
def hidden(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(9))


MODELS = {
    "SD3Transformer2DModel": (
        dict(sample_size=16, patch_size=2, in_channels=4, num_layers=4, attention_head_dim=32, num_attention_heads=4,
             joint_attention_dim=64, caption_projection_dim=128, pooled_projection_dim=64, out_channels=4,
             pos_embed_max_size=32, dual_attention_layers=(0, 1), qk_norm="rms_norm"),
        lambda: dict(hidden_states=hidden(1, 4, 16, 16), encoder_hidden_states=hidden(1, 7, 64),
                     pooled_projections=hidden(1, 64), timestep=torch.tensor([3])),
    ),
    "PixArtTransformer2DModel": (
        dict(sample_size=16, patch_size=2, in_channels=4, out_channels=8, num_layers=4, attention_head_dim=32,
             num_attention_heads=4, cross_attention_dim=128, caption_channels=64, attention_bias=True,
             use_additional_conditions=False),
        lambda: dict(hidden_states=hidden(1, 4, 16, 16), encoder_hidden_states=hidden(1, 7, 64),
                     timestep=torch.tensor([3])),
    ),
    "UNet2DModel": (
        dict(sample_size=16, in_channels=3, out_channels=3, layers_per_block=1, block_out_channels=(64, 128),
             down_block_types=("DownBlock2D", "AttnDownBlock2D"), up_block_types=("AttnUpBlock2D", "UpBlock2D"),
             norm_num_groups=8, time_embedding_type="fourier"),
        lambda: dict(sample=hidden(1, 3, 16, 16), timestep=torch.tensor([0.5])),
    ),
    "AuraFlowTransformer2DModel": (
        dict(sample_size=16, patch_size=2, in_channels=4, num_mmdit_layers=2, num_single_dit_layers=2,
             attention_head_dim=32, num_attention_heads=4, joint_attention_dim=64, caption_projection_dim=128,
             out_channels=4, pos_embed_max_size=64),
        lambda: dict(hidden_states=hidden(1, 4, 16, 16), encoder_hidden_states=hidden(1, 7, 64),
                     timestep=torch.tensor([0.5])),
    ),
    "SanaTransformer2DModel": (
        dict(in_channels=4, out_channels=4, num_layers=3, attention_head_dim=32, num_attention_heads=4,
             cross_attention_head_dim=32, num_cross_attention_heads=4, cross_attention_dim=128, caption_channels=64,
             sample_size=16, patch_size=1),
        lambda: dict(hidden_states=hidden(1, 4, 16, 16), encoder_hidden_states=hidden(1, 7, 64),
                     timestep=torch.tensor([3])),
    ),
}


class Models(unittest.TestCase):
    """Models by themselves, of classes that the package knows nothing of."""

    def test_every_class_computes_the_same_bits_and_announces_all(self):
        for name, (config, inputs) in MODELS.items():
            for dtype in (torch.float32, torch.bfloat16):
                with self.subTest(name, dtype=dtype):
                    self.same(name, config, inputs, dtype)

    def same(self, name, config, inputs, dtype):
        torch.manual_seed(6)
        kind = getattr(diffusers, name)
        path = os.path.join(FOLDER.name, f"{name}-{dtype}")
        varied(kind(**config)).to(dtype).save_pretrained(path, max_shard_size="1MB")
        given = {key: value.to(dtype) if value.is_floating_point() else value for key, value in inputs().items()}
        weights = sum(file.stat().st_size for file in Path(path).glob("*.safetensors"))
        with torch.no_grad():
            model = offload(path, max(weights // 2, 20 * PAGE), check=True)
            self.assertIs(type(model), kind)
            self.assertEqual(model.dtype, dtype)
            expected = as_in(model, kind.from_pretrained(path, torch_dtype=dtype))(**given).sample
            for at in range(3):
                self.assertTrue(torch.equal(model(**given).sample, expected), f"pass {at + 1}")
                if at == 0:
                    before = model.outcore.numbers()["unannounced"]
            numbers = model.outcore.numbers()
            self.assertEqual(numbers["unannounced"], before, numbers["unannounced_names"])
            self.assertLessEqual(numbers["memory_peak"], numbers["memory"])
            self.assertLess(numbers["memory"], weights)
            model.outcore.close()


class Says(unittest.TestCase):
    def test_a_line_at_the_start_and_a_report(self):
        said = io.StringIO()
        with contextlib.redirect_stdout(said):
            pipeline = outcore.torch.offload(folder("flux"), MEMORY["flux"], page_size=PAGE)
        self.assertEqual(said.getvalue().count("\n"), 1)
        for word in ("FluxPipeline of", "text_encoder ", "text_encoder_2 ", "transformer ", "vae ", "2.5 MiB of memory",
                     "stream in every pass of transformer"):
            self.assertIn(word, said.getvalue())
        image(pipeline)
        for word in ("transformer: 3 passes", "text_encoder_2: 1 passes", "read", "at most"):
            self.assertIn(word, pipeline.outcore.report())
        self.assertEqual(pipeline.outcore.numbers()["components"]["transformer"]["passes"], 3)
        self.assertIn("passes", pipeline.vae.outcore.report())
        pipeline.outcore.close()
        self.assertIn("3 passes", pipeline.outcore.report())

    def test_the_page_runs_as_pasted(self):
        page = (DOCS / "python-diffusers.md").read_text(encoding="utf-8")
        code = re.search(r"```python\n(.*?)```", page, re.DOTALL).group(1)
        self.assertLessEqual(len([line for line in code.splitlines() if line.strip()]), 10)
        said = io.StringIO()
        with tempfile.TemporaryDirectory() as here, contextlib.chdir(here), contextlib.redirect_stdout(said):
            os.symlink(folder("flux"), re.search(r'offload\("([^"]+)"', code).group(1))
            exec(compile(code, "python-diffusers.md", "exec"), {})
            self.assertGreater(os.path.getsize("cat.png"), 100)
        self.assertIn("transformer: 4 passes", said.getvalue())


class Refusals(unittest.TestCase):
    def test_what_an_offloaded_pipeline_cannot_do(self):
        pipeline = offload(folder("flux"), MEMORY["flux"])
        for call in (lambda: pipeline.to("meta"), lambda: pipeline.to(torch.float16), pipeline.enable_model_cpu_offload,
                     lambda: pipeline.to("cpu", torch.float16), pipeline.enable_sequential_cpu_offload,
                     lambda: pipeline.enable_group_offload(torch.device("cpu")), pipeline.vae.half):
            with Refused(self, "unsupported", "leave out"):
                call()
        for same in (pipeline.to("cpu"), pipeline.to(torch.float32), pipeline.to("cpu", silence_dtype_warnings=True)):
            self.assertIs(same, pipeline)
        for call in (lambda: copy.deepcopy(pipeline), lambda: pickle.dumps(pipeline), lambda: copy.copy(pipeline),
                     lambda: pickle.dumps(pipeline.outcore)):
            with Refused(self, "unsupported", "second time"):
                call()
        pipeline.vae.outcore.close()
        with Refused(self, "closed", "vae", "anew"):
            pipeline.vae.decode(hidden(1, 4, 8, 8))
        pipeline.outcore.close()
        pipeline.outcore.close()
        with Refused(self, "closed", "text_encoder", "anew"):
            pipeline.text_encoder(torch.zeros(1, 4, dtype=torch.long))

    def test_what_cannot_be_offloaded(self):
        with Refused(self, "invalid_argument", "pipeline", "folder="):
            offload(flux(), "3MiB")
        with Refused(self, "unsupported", "weights of its own", "meta"):
            offload(flux(), MEMORY["flux"], folder=folder("flux"))
        with Refused(self, "budget_too_small", "transformer", "pages"):
            offload(folder("flux"), 8 * PAGE)

    def changed(self, change):
        """The folder of a pipeline in which something is different."""
        path = tempfile.mkdtemp(dir=FOLDER.name)
        shutil.copytree(folder("flux"), path, dirs_exist_ok=True)
        change(Path(path))
        return path

    def test_folders_that_are_no_pipelines(self):
        def index(**entries):
            def change(path):
                file = path / "model_index.json"
                file.write_text(json.dumps({**json.loads(file.read_text()), **entries}))
            return change

        def pickled(path):
            for file in (path / "vae").glob("*.safetensors"):
                file.unlink()
            (path / "vae" / "diffusion_pytorch_model.bin").write_bytes(b"\x80\x02.")

        def coded(path):
            index(vae=["own", "Own"])(path)
            (path / "vae" / "own.py").write_text("raise SystemExit('this ran')")

        def config(component, **entries):
            def change(path):
                file = path / component / "config.json"
                file.write_text(json.dumps({**json.loads(file.read_text()), **entries}))
            return change

        def narrower(path):
            tensors = load_file(path / "vae" / "diffusion_pytorch_model.safetensors")
            del tensors["decoder.conv_in.weight"]
            save_file(tensors, path / "vae" / "diffusion_pytorch_model.safetensors")

        for kind, words, change in (
            ("unsupported", ("vae", "diffusion_pytorch_model.bin", "safetensors"), pickled),
            ("unsupported", ("vae", "own", "never run"), coded),
            ("unsupported", ("Own", "no such pipeline", "never run"), index(_class_name=["own", "Own"])),
            ("unsupported", ("NoPipeline", "no such pipeline"), index(_class_name="NoPipeline")),
            ("unsupported", ("FluxTransformer2DModel", "no such pipeline"), index(_class_name="FluxTransformer2DModel")),
            ("unsupported", ("transformer", "NoModel", "no module"), index(transformer=["diffusers", "NoModel"])),
            ("unsupported", ("transformer", "quantised"), config("transformer", quantization_config={"bits": 4})),
            ("invalid_argument", ("transformer", "shape"), config("transformer", pooled_projection_dim=64)),
            ("not_found", ("vae", "decoder.conv_in.weight"), narrower),
            ("not_found", ("text_encoder_2",), lambda path: shutil.rmtree(path / "text_encoder_2")),
            ("not_found", ("tokenizer",), lambda path: shutil.rmtree(path / "tokenizer")),
            ("format", ("model_index.json",), lambda path: (path / "model_index.json").write_text("{")),
            ("format", ("model_index.json",), lambda path: (path / "model_index.json").write_text("[]")),
        ):
            with self.subTest(words), Refused(self, kind, *words):
                offload(self.changed(change), MEMORY["flux"])

    def test_names_of_earlier_versions_are_known(self):
        names = {"to_q": "query", "to_k": "key", "to_v": "value", "to_out.0": "proj_attn"}

        def old(path):
            file = path / "vae" / "diffusion_pytorch_model.safetensors"
            tensors = load_file(file)
            for now, before in names.items():
                tensors = {name.replace(f".{now}.", f".{before}."): value for name, value in tensors.items()}
            self.assertTrue([name for name in tensors if name.endswith(".proj_attn.weight")])
            save_file(tensors, file)

        latents = hidden(1, 4, 8, 8)
        with torch.no_grad():
            found, wanted = (
                offload(os.path.join(path, "vae"), 24 * PAGE) for path in (self.changed(old), folder("flux"))
            )
            self.assertTrue(torch.allclose(found.decode(latents).sample, wanted.decode(latents).sample, atol=1e-4))
            found.outcore.close()
            wanted.outcore.close()

    def test_the_weights_beside_those_of_a_variant_are_used(self):
        def variant(path):
            file = path / "vae" / "diffusion_pytorch_model.safetensors"
            save_file(load_file(file), path / "vae" / "diffusion_pytorch_model.fp16.safetensors")

        pipeline = offload(self.changed(variant), MEMORY["flux"])
        self.assertEqual(image(pipeline, "np", steps=1).shape[-1], 3)
        pipeline.outcore.close()


if __name__ == "__main__":
    unittest.main()
