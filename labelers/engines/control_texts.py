"""Texts that are control tokens to one model or another. A chat API turns them into those tokens wherever they occur,
in data too.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Sequence

from relabel.manifests.asks import Message

KNOWN_CONTROL_TEXTS: tuple[str, ...] = (
    # ChatML: Qwen, SmolLM, Yi, …; GPT
    *("<|im_start|>", "<|im_end|>", "<|im_sep|>", "<|endoftext|>", "<|endofprompt|>"),
    *("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|return|>", "<|call|>"),
    # Llama 2, Mistral
    *("<s>", "</s>", "<unk>", "[INST]", "[/INST]", "<<SYS>>", "<</SYS>>", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]"),
    *(
        "[AVAILABLE_TOOLS]",
        "[/AVAILABLE_TOOLS]",
        "[TOOL_CALLS]",
        "[TOOL_RESULTS]",
        "[/TOOL_RESULTS]",
        "[THINK]",
        "[/THINK]",
    ),
    # Llama 3, 4
    *(
        "<|begin_of_text|>",
        "<|end_of_text|>",
        "<|start_header_id|>",
        "<|end_header_id|>",
        "<|eot_id|>",
        "<|eom_id|>",
        "<|python_tag|>",
    ),
    *("<|header_start|>", "<|header_end|>", "<|eot|>", "<|eom|>", "<|finetune_right_pad_id|>"),
    # Gemma
    *("<start_of_turn>", "<end_of_turn>", "<bos>", "<eos>", "<pad>", "<start_of_image>", "<end_of_image>"),
    # Phi, GLM, InternLM
    *("<|system|>", "<|user|>", "<|assistant|>", "<|observation|>", "[gMASK]", "<sop>", "<eop>", "<eoh>", "<eoa>"),
    # Command R, Granite
    *(
        "<BOS_TOKEN>",
        "<EOS_TOKEN>",
        "<|START_OF_TURN_TOKEN|>",
        "<|END_OF_TURN_TOKEN|>",
        "<|SYSTEM_TOKEN|>",
        "<|USER_TOKEN|>",
    ),
    *("<|CHATBOT_TOKEN|>", "<|start_of_role|>", "<|end_of_role|>"),
    # DeepSeek (fullwidth bars)
    *(
        "<｜begin▁of▁sentence｜>",
        "<｜end▁of▁sentence｜>",
        "<｜User｜>",
        "<｜Assistant｜>",
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁outputs▁begin｜>",
    ),
    # tools and thoughts of several; images
    *(
        "<tool_call>",
        "</tool_call>",
        "<tool_response>",
        "</tool_response>",
        "<|vision_start|>",
        "<|vision_end|>",
        "<|image_pad|>",
    ),
    *("<think>", "</think>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|file_sep|>", "<|repo_name|>"),
)


class ControlTexts:
    """Finds control tokens' texts in data, in compatibility look-alikes too, which some tokenizers normalise.

    Args:
        texts: what counts as one.
    """

    def __init__(self, texts: Iterable[str]) -> None:
        longest_first = sorted({text for text in texts if text.strip()}, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first))) if longest_first else None

    def find(self, messages: Sequence[Message]) -> tuple[str, str] | None:
        """Field and text of the first control token in the messages' data, or None; `a message` where several parts
        make it together.
        """
        pattern = self._pattern
        if pattern is None:
            return None
        for message in messages:
            for field, text in zip(message.fields, message.parts[1::2], strict=False):
                match = pattern.search(text)
                if match is None and not text.isascii():
                    match = pattern.search(unicodedata.normalize("NFKC", text))
                if match is not None:
                    return field, match.group()
            in_template = [found for part in message.parts[::2] for found in pattern.findall(part)]
            if (whole := pattern.findall(message.text)) != in_template:
                return "a message", next((text for text in whole if text not in in_template), whole[0] if whole else "")
        return None
