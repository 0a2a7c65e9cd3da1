"""The tables of docs/doctor.md: what the doctor says of the chat templates of twenty model families.

What this script promises:

- Each row is a diagnosis made when it runs; nothing is written by hand but the families' names.
- Templates are those that the package `trl` carries, with the family's own tokenizer where the tests have it, else
  with Qwen3's, its missing control tokens added, under the template's name.

    python -m scripts.doctor_table    # from the root of a clone; prints both tables
"""

from __future__ import annotations

import copy
from typing import Any

from tests import families
from unspool.template import Diagnosis, doctor

FAMILIES = {
    "Cohere Command": "cohere",
    "DeepSeek R1 Distill": "deepseek_r1_distill",
    "DeepSeek V3": "deepseekv3",
    "Gemma 3": "gemma3",
    "Gemma 4": "gemma4",
    "GLM 4.5": "glm4moe",
    "gpt-oss": "gptoss",
    "LFM2": "lfm2_v2",
    "LFM2.5": "lfm2_2_5",
    "Llama 3": "llama3",
    "Llama 3.1": "llama3_1",
    "Muse Glimmer": "muse_glimmer",
    "Nemotron 3 Nano": "nemotron_3_nano",
    "Phi 3": "phi3",
    "Phi 3.5": "phi3_5",
    "Qwen2.5": "qwen2_5",
    "Qwen3": "qwen3",
    "Qwen3 Instruct 2507": "qwen3_instruct_2507",
    "Qwen3.5": "qwen3_5_think",
    "SmolVLM": "smolvlm",
}
OWN = {
    "DeepSeek V3": "deepseek_v3",
    "Gemma 3": "gemma3",
    "gpt-oss": "gptoss",
    "Llama 3.1": "llama3_1",
    "Qwen3": "qwen3",
}
_HEAD = "| family | template | ready | parser | exact bridges | broken, *notes* |\n|---|---|---|---|---|---|"


def of_families() -> str:
    """The table of twenty families, as Markdown."""
    rows = []
    for family, template in FAMILIES.items():
        tokenizer = copy.copy(families.tokenizer_for(template))
        tokenizer.name_or_path = template  # not the name of the family that it stands in for
        rows.append(_row(family, f"`{template}`", doctor(tokenizer, chat_template=families.trl_templates()[template])))
    return "\n".join([_HEAD, *rows])


def of_tokenizers() -> str:
    """The table of tokenizers with the templates that they were packed with, as Markdown."""
    return "\n".join([_HEAD, *(_row(family, "its own", doctor(_own(name))) for family, name in OWN.items())])


def _own(name: str) -> Any:
    tokenizer = copy.copy(families.load(name))
    tokenizer.name_or_path = name
    return tokenizer


def _row(family: str, template: str, found: Diagnosis) -> str:
    exact = sum(outcome == "exact" for outcome in found.bridges.values())
    bridges = f"{exact} of {len(found.bridges)}" if found.bridges else ""
    said = [f"`{finding.code}`" for finding in found.broken] + [f"*`{finding.code}`*" for finding in found.notes]
    parser = f"`{found.parser}`" if found.parser else ""
    return f"| {family} | {template} | {'yes' if found.ok else 'no'} | {parser} | {bridges} | {', '.join(said)} |"


if __name__ == "__main__":
    print(of_families(), of_tokenizers(), sep="\n\n")
