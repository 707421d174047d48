"""A scripted runtime over the text files of a folder: for tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from edgeqwen.config import MAX_DEFAULT_CONTEXT
from edgeqwen.core.package import TOKENIZER, read_text_files
from edgeqwen.core.step import Runtime
from edgeqwen.engine.settings import ModelFiles
from edgeqwen.loading.options import DaemonOptions, Model, chat_template
from edgeqwen.text import Tokenizer

END_MARKS: Final = ("<|im_end|>", "<|endoftext|>", "</s>")
"""What ends an answer of a scripted runtime whose folder does not say."""


def open_scripted_model(options: DaemonOptions) -> Model:
    """A folder with tokenizer.json, and template and generation config if it has them; no weights."""
    from edgeqwen.runtime.fake import load_fake, parse_fake

    folder, kv = options.package_path, options.config.kv
    script = parse_fake(options.config.engine.runtime)
    text = read_text_files(folder)
    tokenizer = Tokenizer.from_file(folder / TOKENIZER)
    marks = (tokenizer.added_token_id(mark) for mark in END_MARKS)
    files = ModelFiles(
        name="fake",
        quant="fp32",
        tokenizer=tokenizer,
        template=chat_template(text.template),
        generation_defaults=text.generation_config,
        eos_token_ids=text.eos_token_ids or tuple(mark for mark in marks if mark is not None),
    )

    def load(progress: Callable[[float], None]) -> Runtime:
        return load_fake(
            script,
            progress,
            vocab_size=tokenizer.num_tokens,
            num_tokens=tokenizer.num_tokens,
            num_slots=kv.slots,
            capacity=kv.context or MAX_DEFAULT_CONTEXT,
            eos=next(iter(files.eos_token_ids), None),
        )

    return Model(files, load)
