"""AWQ and GPTQ folders: what their bits mean, read plainly from the layouts' definitions, and what is refused.

There is nothing of others to compare with: transformers leaves reading them to packages with kernels of their own
(gptqmodel), which tests do not install. GGUF is compared with the gguf package.
"""

import json

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file

from benchmarks.packed_folder import Packing, write_packed_folder
from engine.errors import ModelError
from engine.kernels.reference import ReferenceBackend
from engine.model.load import load_model
from engine.model.packed_format import Method, PackedFormat
from engine.model.packed_matrix import unpack_matrix
from engine.model.transformer import Quantization
from engine.model.weights import model_digest, open_model

OUTPUTS, INPUTS = 96, 128
MODULE = "model.layers.0.mlp.down_proj"
MODEL = hf.LlamaConfig(
    vocab_size=96,
    hidden_size=OUTPUTS,
    intermediate_size=INPUTS,
    num_hidden_layers=1,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
    initializer_range=0.3,
)
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": False}
LAYOUTS = {
    "awq": AWQ,
    "awq, groups of 64": AWQ | {"group_size": 64},
    "awq, one group": AWQ | {"group_size": -1},
    "gptq": GPTQ,
    "gptq of the second version": GPTQ | {"checkpoint_format": "gptq_v2"},
    "gptq of 8 bits": GPTQ | {"bits": 8, "group_size": 64, "format": "gptq"},
    "gptq, a last group of 32": GPTQ | {"group_size": 96},
    "gptq in the order of activations": GPTQ | {"desc_act": True},
}
WHERE_FLOATS_ARE = {
    "model.norm.weight": (OUTPUTS,),
    "model.embed_tokens.weight": (96, OUTPUTS),
    "model.layers.0.mlp.up_proj.weight": (INPUTS, OUTPUTS),
    "model.layers.0.self_attn.rotary_emb.inv_freq": (12,),
    f"{MODULE}.bias": (OUTPUTS,),
}


@pytest.fixture(scope="module")
def floats(random_model_of, tmp_path_factory):
    """The tensors of a small model; no test may change them."""
    folder = tmp_path_factory.mktemp("floats")
    random_model_of(MODEL).save_pretrained(folder)
    return load_file(folder / "model.safetensors")


@pytest.fixture
def folder_of(floats, tmp_path):
    """Writes a folder whose MODULE has random bits in a layout; `change` may break its tensors."""

    def write(settings, change=lambda tensors: None):
        tensors = dict(floats)
        del tensors[f"{MODULE}.weight"]
        tensors |= {f"{MODULE}.{part}": tensor for part, tensor in random_parts(settings).items()}
        change(tensors)
        save_file(tensors, tmp_path / "model.safetensors")
        config = MODEL.to_dict() | {"quantization_config": settings}
        (tmp_path / "config.json").write_text(json.dumps(config))
        return tmp_path

    return write


def random_parts(settings):
    random = torch.Generator().manual_seed(11)

    def words(*shape):
        return torch.randint(-(2**31), 2**31, shape, generator=random).to(torch.int32)

    size = INPUTS if settings["group_size"] == -1 else settings["group_size"]
    groups, per_word = -(-INPUTS // size), 32 // settings["bits"]
    awq = settings["quant_method"] == "awq"
    parts = {
        "qweight": words(INPUTS, OUTPUTS // 8) if awq else words(INPUTS // per_word, OUTPUTS),
        "qzeros": words(groups, OUTPUTS // per_word),
        "scales": (torch.rand(groups, OUTPUTS, generator=random) * 0.1).half(),
    }
    if not awq:
        order = torch.arange(INPUTS, dtype=torch.int32) // size
        parts["g_idx"] = order[torch.randperm(INPUTS, generator=random)] if settings["desc_act"] else order
    return parts


def plain_value(parts, settings, output, place):
    """One weight, bit by bit as the layout's definition has it."""
    bits, awq = settings["bits"], settings["quant_method"] == "awq"
    per_word = 32 // bits
    size = INPUTS if settings["group_size"] == -1 else settings["group_size"]
    group = place // size if awq else int(parts["g_idx"][place])
    word, zero_word = output // per_word, int(parts["qzeros"][group, output // per_word]) & 0xFFFFFFFF
    if awq:
        nibble = (0, 2, 4, 6, 1, 3, 5, 7).index(output % 8)
        code = (int(parts["qweight"][place, word]) & 0xFFFFFFFF) >> 4 * nibble & 15
        zero = zero_word >> 4 * nibble & 15
    else:
        stored = int(parts["qweight"][place // per_word, output]) & 0xFFFFFFFF
        code = stored >> bits * (place % per_word) & (1 << bits) - 1
        if settings.get("checkpoint_format") != "gptq_v2":
            zero_word += sum(1 << at for at in range(0, 32, bits))
        zero = zero_word >> bits * (output % per_word) & (1 << bits) - 1
    return (code - zero) * float(parts["scales"][group, output])


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_packed_weight_has_the_values_that_its_bits_say(name, folder_of):
    settings = LAYOUTS[name]
    _, weights = open_model(folder_of(settings))
    parts = random_parts(settings)
    wanted = [[plain_value(parts, settings, n, k) for k in range(INPUTS)] for n in range(OUTPUTS)]
    values = weights.read(f"{MODULE}.weight")
    assert values.dtype == torch.float32 and torch.equal(values.double(), torch.tensor(wanted).double())
    taken = weights.quantized(f"{MODULE}.weight")
    if name == "gptq in the order of activations":
        assert taken is None
    else:
        assert torch.equal(taken.values(), values)


def words(*values):
    return torch.tensor([values]).to(torch.uint32).view(torch.int32)


def format_of(method, bits=4, zeros_less_one=False):
    return PackedFormat(
        method=method, bits=bits, group_size=None, zeros_less_one=zeros_less_one, in_order=True
    )


def unpacked(form, qweight, qzeros):
    """Of one word of inputs; every scale is 1."""
    inputs = 1 if form.method is Method.AWQ else 32 // form.bits
    scales = torch.ones(1, qzeros.shape[1] * 32 // form.bits)
    return unpack_matrix(form, qweight, qzeros, scales, torch.zeros(inputs, dtype=torch.long))


def test_words_that_can_be_read_by_eye():
    awq = unpacked(format_of(Method.AWQ), words(0x75316420), words(0xECA8FDB9))
    assert awq.codes[:, 0].tolist() == [0, 1, 2, 3, 4, 5, 6, 7]
    assert awq.zeros[:, 0].tolist() == [9, 8, 11, 10, 13, 12, 15, 14]
    first = unpacked(format_of(Method.GPTQ, zeros_less_one=True), words(*[0x76543210] * 8), words(0x77777777))
    assert first.codes.tolist() == [[0, 1, 2, 3, 4, 5, 6, 7]] * 8
    assert first.zeros[:, 0].tolist() == [8] * 8
    bytes_ = unpacked(format_of(Method.GPTQ, 8), words(*[0xFF800100] * 4), words(0x7F800201))
    assert bytes_.codes.tolist() == [[0, 1, 128, 255]] * 4
    assert bytes_.zeros[:, 0].tolist() == [1, 2, 128, 127]


def test_a_zero_of_nothing_borrows_from_its_neighbour_in_the_first_version_of_gptq():
    """Writers take one off whole words: 0x76543210 - 0x11111111."""
    first = format_of(Method.GPTQ, zeros_less_one=True)
    matrix = unpacked(first, words(*[0] * 8), words(0x654320FF))
    assert matrix.zeros[:, 0].tolist() == [0, 1, 2, 3, 4, 5, 6, 7]


def test_what_no_float16_can_say_is_read_as_floats(folder_of):
    def stretch(tensors):
        tensors[f"{MODULE}.scales"] = tensors[f"{MODULE}.scales"].float() * 1.001

    _, weights = open_model(folder_of(AWQ, stretch))
    assert weights.quantized(f"{MODULE}.weight") is None

    def narrow(tensors):
        tensors[f"{MODULE}.scales"] = tensors[f"{MODULE}.scales"].bfloat16()

    _, weights = open_model(folder_of(AWQ, narrow))
    weight = weights.quantized(f"{MODULE}.weight")
    assert torch.equal(weight.values(), weights.read(f"{MODULE}.weight"))


@pytest.mark.parametrize(
    "packing",
    [
        Packing(method="awq", bits=4, group_size=32, symmetric=False),
        Packing(method="gptq", bits=4, group_size=32, symmetric=False),
        Packing(method="gptq", bits=8, group_size=32, symmetric=True),
    ],
    ids=lambda packing: f"{packing.method} {packing.bits}",
)
def test_logits_are_those_of_the_dequantised_model(
    packing, random_model_of, logits_of, assert_logits_close, tmp_path
):
    model, tokens = random_model_of(MODEL), [3, 17, 5, 91, 2, 44]
    model.save_pretrained(tmp_path / "floats")
    write_packed_folder(tmp_path / "floats", tmp_path / "packed", packing)
    _, weights = open_model(tmp_path / "packed")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            rounded = weights.read(name).float()
            spread = float(parameter.abs().max())
            assert (rounded - parameter).abs().max() <= spread * 2.5 / (1 << packing.bits), name
            parameter.copy_(rounded)
    assert_logits_close(logits_of(tmp_path / "packed", tokens), model, tokens)


def test_products_take_the_integers_as_they_are_where_all_of_them_are_packed(folder_of):
    packed = []

    class Watching(ReferenceBackend):
        def pack_quantized(self, weight, bias=None):
            packed.append(weight)
            return super().pack_quantized(weight, bias)

    for settings in (AWQ, GPTQ | {"desc_act": True}):
        load_model(folder_of(settings), Watching(torch.float32), 8, Quantization.STORED)
    assert [(weight.bits, tuple(weight.codes.shape)) for weight in packed] == [(4, (OUTPUTS, INPUTS))]
    even = folder_of(GPTQ, lambda tensors: tensors[f"{MODULE}.qzeros"].fill_(0x77777777))
    load_model(even, Watching(torch.float32), 8, Quantization.STORED)
    assert packed[-1].zeros is None and packed[-1].zero == 8


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"bits": 4}, "quantization_config.quant_method is missing"),
        (
            AWQ | {"quant_method": "fp8"},
            "quantization_config.quant_method is 'fp8'; served are awq, gptq",
        ),
        (AWQ | {"bits": 8}, "quantization_config.bits is 8; served are 4"),
        (GPTQ | {"bits": 3}, "quantization_config.bits is 3; served are 4, 8"),
        (AWQ | {"group_size": 0}, "quantization_config.group_size is 0, wanted -1 or an integer >= 1"),
        (AWQ | {"group_size": "64"}, "quantization_config.group_size is '64', wanted an integer"),
        (AWQ | {"group_size": 96}, f"group_size 96 does not divide the 128 inputs of {MODULE}.weight"),
        (AWQ | {"version": "GEMV"}, "quantization_config.version is 'GEMV'; served are gemm"),
        (AWQ | {"backend": "llm-awq"}, "quantization_config.backend 'llm-awq' is not served"),
        (AWQ | {"zero_point": False}, "quantization_config.zero_point is false; served is true"),
        (
            GPTQ | {"checkpoint_format": "marlin"},
            "quantization_config.checkpoint_format is 'marlin'; served are gptq, gptq_v2",
        ),
        (GPTQ | {"is_marlin_format": True}, "quantization_config.is_marlin_format is true"),
        (GPTQ | {"pack_dtype": "int8"}, "quantization_config.pack_dtype is 'int8'; served are int32"),
        (GPTQ | {"dynamic": {"+:.*": {"bits": 8}}}, "quantization_config.dynamic has '+:.*'; served are"),
        ([4], "quantization_config is [4], wanted a section"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_quantization_that_is_not_served_is_named(folder_of, settings, reason):
    folder = folder_of(AWQ)
    config = json.loads((folder / "config.json").read_text()) | {"quantization_config": settings}
    (folder / "config.json").write_text(json.dumps(config))
    assert reason in refusal(folder)


def cut(part):
    def change(tensors):
        name = f"{MODULE}.{part}"
        tensors[name] = tensors[name][:-1].contiguous()

    return change


def drop(part):
    return lambda tensors: tensors.pop(f"{MODULE}.{part}")


def put(name, tensor):
    return lambda tensors: tensors.update({name: tensor})


@pytest.mark.parametrize(
    ("settings", "change", "reason"),
    [
        (AWQ, drop("qzeros"), f"tensor {MODULE}.qzeros is missing"),
        (GPTQ, drop("scales"), f"tensor {MODULE}.scales is missing"),
        (GPTQ | {"desc_act": True}, drop("g_idx"), f"tensor {MODULE}.g_idx is missing"),
        (AWQ, drop("qweight"), f"tensor '{MODULE}.qzeros' has dtype I32, and is of no packed weight"),
        (AWQ, cut("qzeros"), f"tensor {MODULE}.qzeros has shape [3, 12], wanted [4, 12]"),
        (GPTQ, cut("scales"), f"tensor {MODULE}.scales has shape [3, 96], wanted [4, 96]"),
        (GPTQ, cut("g_idx"), f"tensor {MODULE}.g_idx has shape [127], wanted [128]"),
        (GPTQ, put(f"{MODULE}.qweight", torch.zeros(15, 96, dtype=torch.int32)), "wanted"),
        (AWQ, put(f"{MODULE}.qweight", torch.zeros(9, dtype=torch.int32)), "wanted ['rows', 'columns']"),
        (
            AWQ,
            put(f"{MODULE}.qweight", torch.zeros(128, 12)),
            f"{MODULE}.qweight has dtype F32; served are I32",
        ),
        (AWQ, put(f"{MODULE}.qweight", torch.zeros(0, 12, dtype=torch.int32)), "shape [0, 12], wanted"),
        (
            GPTQ,
            put(f"{MODULE}.qweight", torch.zeros(16, 99, dtype=torch.int32)),
            f"tensor {MODULE}.weight has 99 outputs, wanted a multiple of 8",
        ),
        (AWQ, put(f"{MODULE}.weight", torch.zeros(96, 128)), "is there twice, as floats and packed"),
        (AWQ, put(f"{MODULE}.bias", torch.ones(96)), "bias' has no place in this llama model"),
        (
            AWQ,
            put(f"{MODULE}.g_idx", torch.zeros(128, dtype=torch.int32)),
            f"tensor '{MODULE}.g_idx' has dtype I32, and is of no packed weight",
        ),
        *(
            (settings, put(name, torch.zeros(shape, dtype=torch.int32)), f"tensor '{name}' has dtype I32")
            for settings in (AWQ, GPTQ)
            for name, shape in WHERE_FLOATS_ARE.items()
        ),
        (
            GPTQ,
            put(f"{MODULE}.g_idx", torch.zeros(128, dtype=torch.int32)),
            f"tensor {MODULE}.g_idx is not in order, but quantization_config.desc_act is false",
        ),
        (
            GPTQ | {"desc_act": True},
            put(f"{MODULE}.g_idx", torch.full((128,), 4, dtype=torch.int32)),
            f"tensor {MODULE}.g_idx holds groups outside [0, 4)",
        ),
    ],
)
def test_parts_that_do_not_fit_are_named(folder_of, settings, change, reason):
    assert reason in refusal(folder_of(settings, change))


def test_packed_tensors_without_a_quantization_are_refused(folder_of):
    folder = folder_of(AWQ)
    (folder / "config.json").write_text(json.dumps(MODEL.to_dict()))
    assert "has dtype I32; config.json has no quantization_config" in refusal(folder)


def refusal(folder):
    with pytest.raises(ModelError) as raised:
        open_model(folder)
    return str(raised.value)


def test_scales_that_are_not_finite_are_refused_when_the_model_is_loaded(folder_of):
    folder = folder_of(AWQ, lambda tensors: tensors[f"{MODULE}.scales"][1, 2].fill_(torch.inf))
    for quantization in (Quantization.STORED, Quantization.NONE):
        with pytest.raises(ModelError, match=f"tensor {MODULE}.weight holds values that are not finite"):
            load_model(folder, ReferenceBackend(torch.float32), 8, quantization)


def test_biases_of_zeros_that_old_writers_add_are_left_out(folder_of):
    _, weights = open_model(folder_of(GPTQ, put(f"{MODULE}.bias", torch.zeros(96).half())))
    assert f"{MODULE}.bias" not in weights.shapes


def test_the_digest_covers_every_part_and_what_its_bits_mean(folder_of):
    def add_one(part):
        return lambda tensors: tensors[f"{MODULE}.{part}"][-1].add_(1)

    order = GPTQ | {"desc_act": True}
    digests = [
        model_digest(folder_of(GPTQ)),
        model_digest(folder_of(GPTQ | {"checkpoint_format": "gptq_v2"})),
        *(model_digest(folder_of(GPTQ, add_one(part))) for part in ("qweight", "qzeros", "scales")),
        model_digest(folder_of(order)),
        model_digest(folder_of(order, put(f"{MODULE}.g_idx", torch.zeros(INPUTS, dtype=torch.int32)))),
    ]
    assert len(set(digests)) == len(digests)
    assert digests[0] == model_digest(folder_of(GPTQ))
