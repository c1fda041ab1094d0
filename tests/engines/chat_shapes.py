"""Chat templates in the shapes of published ones, in our own words, with what must come of a prompt."""

from typing import NamedTuple

EACH = "{% for m in messages %}"
END = "{% endfor %}"
ANSWER = "{% if add_generation_prompt %}"


class Shape(NamedTuple):
    """A template.

    Args:
        two, four: what becomes of system and user; of system, user, assistant, user: `kept`, `folded` (the system's
            text opens the user's turn), or what the refusal says.
        is_plain: it looks into no text, so that a kept prompt is its own rendering.
        opened: what it ends with inside a thought.
    """

    template: str
    two: str
    four: str
    is_plain: bool = True
    opened: str = ""


def chatml(content: str = "m.content", answer: str = "", before: str = "") -> str:
    turn = "{{ '<|im_start|>' + m.role + '\n' + " + content + " + '<|im_end|>\n' }}"
    return f"{before}{EACH}{turn}{END}{ANSWER}{{{{ '<|im_start|>assistant\n{answer}' }}}}{{% endif %}}"


CUTS_THOUGHTS = "(m.content.split('</think>')[-1] if m.role == 'assistant' else m.content)"
ALTERNATES = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}{% endfor %}"
)
LLAMA_2 = (
    "{% if messages[0].role == 'system' %}{% set rules = '<<SYS>>\n' + messages[0].content + '\n<</SYS>>\n\n' %}"
    "{% set turns = messages[1:] %}{% else %}{% set rules = '' %}{% set turns = messages %}{% endif %}"
    "{% for m in turns %}{% if m.role == 'user' %}"
    "{{ '<s>[INST] ' + ((rules if loop.first else '') + m.content).strip() + ' [/INST]' }}"
    "{% elif m.role == 'assistant' %}{{ ' ' + m.content.strip() + ' </s>' }}{% endif %}{% endfor %}"
)
LLAMA_3 = (
    EACH + "{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' + m.content | trim + '<|eot_id|>' }}" + END
) + "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}"
MISTRAL = (  # the system's text is put into the last question
    "{% if messages[0].role == 'system' %}{% set rules = messages[0].content %}{% set turns = messages[1:] %}"
    "{% else %}{% set turns = messages %}{% endif %}{% for m in turns %}{% if m.role == 'user' %}"
    "{{ '[INST] ' + (rules + '\n\n' if loop.last and rules is defined else '') + m.content + '[/INST]' }}"
    "{% else %}{{ ' ' + m.content + '</s>' }}{% endif %}{% endfor %}"
)
GEMMA = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    + ALTERNATES
    + EACH
    + "{{ '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\n' + m.content | trim }}"
    "{{ '<end_of_turn>\n' }}" + END + ANSWER + "{{ '<start_of_turn>model\n' }}{% endif %}"
)
PHI_3 = (
    EACH + "{% if m.role == 'user' %}{{ '<|user|>\n' + m.content + '<|end|>\n<|assistant|>\n' }}"
    "{% elif m.role == 'assistant' %}{{ m.content + '<|end|>\n' }}{% endif %}" + END
)
R1 = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ m.content }}{% elif m.role == 'user' %}"
    "{{ '<｜User｜>' + m.content }}{% else %}{{ '<｜Assistant｜>' + m.content.split('</think>')[-1] }}"
    "{{ '<｜end▁of▁sentence｜>' }}{% endif %}{% endfor %}" + ANSWER + "{{ '<｜Assistant｜><think>\n' }}{% endif %}"
)
V3_1 = R1.replace("<think>\n", "</think>").replace("<｜Assistant｜>' +", "<｜Assistant｜></think>' +")
COMMAND_R = (
    "{% if messages[0].role != 'system' %}{{ '<|SYSTEM_TOKEN|>You are Coral.<|END_OF_TURN_TOKEN|>' }}{% endif %}"
    + EACH
    + "{{ '<|' + {'user': 'USER', 'assistant': 'CHATBOT', 'system': 'SYSTEM'}[m.role] + '_TOKEN|>' }}"
    "{{ m.content.strip() + '<|END_OF_TURN_TOKEN|>' }}" + END + "{{ '<|CHATBOT_TOKEN|>' }}"
)
GRANITE = (
    ("{% if messages[0].role != 'system' %}{{ 'Today is ' + strftime_now('%B %d, %Y') }}{% endif %}" + EACH)
    + "{{ '<|start_of_role|>' + m.role + '<|end_of_role|>' + m.content + '<|end_of_text|>\n' }}"
    + (END + ANSWER + "{{ '<|start_of_role|>assistant<|end_of_role|>' }}{% endif %}")
)
SAYS_THE_DAY = (
    "{% if date_string is not defined %}{% set date_string = strftime_now('%d %b %Y') %}{% endif %}"
    "{{ 'Today Date: ' + date_string + '\n' }}" + LLAMA_3
)
ZEPHYR = EACH + "{{ '<|' + m.role + '|>\n' + m.content + eos_token + '\n' }}" + END + "{{ '<|assistant|>\n' }}"
LAST_ALONE = "{{ '[Q] ' + messages[-1].content + ' [A]' }}"
DROPS_ANSWERS = EACH + "{% if m.role != 'assistant' %}{{ m.role + ': ' + m.content + '\n' }}{% endif %}" + END
LISTS = EACH + "{% for part in m.content %}{% if part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}" + END
FALCON = EACH + "{{ m.role + ': ' + m.content.strip().replace('\n\n', '\n') + '\n' }}" + END + "{{ 'Falcon:' }}"
TAGGED = EACH + "{{ '<' + m.role + '>\n' + m.content + '</' + m.role + '>\n' }}" + END + "{{ '<assistant>\n' }}"

SHAPES = {
    "chatml": Shape(chatml(), "kept", "kept"),
    "qwen2.5": Shape(
        chatml(before="{% if messages[0].role != 'system' %}{{ 'You are a helpful assistant.\n' }}{% endif %}"),
        "kept",
        "kept",
    ),
    "qwen3": Shape(chatml(CUTS_THOUGHTS, "<think>\n"), "kept", "kept", False, "<think>\n"),
    "qwen3-silent": Shape(chatml(CUTS_THOUGHTS, "<think>\n\n</think>\n\n"), "kept", "kept", False),
    "seed-silent": Shape(
        chatml(answer="<seed:think><seed:cot_budget_reflect>"),
        "kept",
        "kept",
        opened="<seed:think><seed:cot_budget_reflect>",
    ),
    "exaone": Shape(chatml(answer="<thought>\n"), "kept", "kept", True, "<thought>\n"),
    "llama-2": Shape(LLAMA_2, "kept", "kept"),
    "llama-3": Shape(LLAMA_3, "kept", "kept"),
    "llama-3.2": Shape(SAYS_THE_DAY, "kept", "kept"),
    "mistral": Shape(MISTRAL, "kept", "folded"),
    "gemma": Shape(GEMMA, "folded", "folded"),
    "phi-3": Shape(PHI_3, "folded", "folded"),
    "zephyr": Shape(ZEPHYR, "kept", "kept"),
    "deepseek-r1": Shape(R1, "kept", "kept", False, "<think>\n"),
    "deepseek-v3.1": Shape(V3_1, "kept", "kept", False),
    "command-r": Shape(COMMAND_R, "kept", "kept"),
    "granite": Shape(GRANITE, "kept", "kept"),
    "falcon": Shape(FALCON, "kept", "kept", False),
    "tagged": Shape(TAGGED, "kept", "kept"),
    "last alone": Shape(LAST_ALONE, "folded", "leaves out turn 1 of 4 (system)"),
    "no answers": Shape(DROPS_ANSWERS, "kept", "leaves out turn 3 of 4 (assistant)"),
    "lists": Shape(LISTS, "leaves out turn 1 of 2 (system)", "leaves out turn 1 of 4 (system)"),
    "shouts": Shape(chatml("m.content | upper"), "leaves out turn 1 of 2 (system)", "leaves out turn 1 of 4 (system)"),
}
