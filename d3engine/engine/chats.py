"""Conversations: an engine's answers to messages, which the model's chat template makes prompts of."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from collections.abc import Sequence as AnySequence
from typing import Any

from d3engine.engine.new_requests import refuse_others
from d3engine.request.outputs import RequestOutput
from d3engine.request.params import SamplingParams
from d3engine.text.chat_template import ChatPrompts, Messages, as_conversations
from d3engine.text.prompts import Prompt


class WritesChatPrompts:
    """Writes conversations as prompts, by the model's chat template."""

    _chat_prompts: ChatPrompts

    def chat_template(self) -> str | None:
        """Return the text of the model's own chat template, None without one; its files are read once."""
        own = self._chat_prompts.template
        return None if own is None else own.source

    def chat_prompt(
        self,
        messages: Messages,
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: AnySequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **of_vllm: Any,
    ) -> dict[str, list[int]]:
        """The prompt of a conversation as token ids, for `generate`; the arguments are those of `chat`."""
        refuse_others(of_vllm, "chat")
        ids = self._chat_prompts.token_ids(
            messages,
            chat_template=chat_template,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            chat_template_kwargs=chat_template_kwargs,
        )
        return {"prompt_token_ids": ids}


class Chats(WritesChatPrompts):
    """What an engine does with conversations, by what it does with prompts."""

    @abstractmethod
    def generate(
        self,
        prompts: Prompt | AnySequence[Prompt],
        sampling_params: SamplingParams | AnySequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        lora_request: Any = None,
        **of_vllm: Any,
    ) -> list[RequestOutput]:
        """Answer `prompts`: see `Engine`."""

    def chat(
        self,
        messages: Messages | AnySequence[Messages],
        sampling_params: SamplingParams | AnySequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: AnySequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        lora_request: Any = None,
        **of_vllm: Any,
    ) -> list[RequestOutput]:
        """Answer one conversation (a list of {"role", "content"}), or a list of them, by the model's chat template.

        Args:
            messages: the conversation, or several.
            sampling_params: as for `generate`.
            use_tqdm: show a progress bar.
            chat_template: the text of another Jinja template; it runs within the same limits as the model's own.
            add_generation_prompt: let the template begin the answer.
            continue_final_message: let the answer go on where the last message ends; not with `add_generation_prompt`.
            tools: JSON objects that describe what the model may call, for the template.
            chat_template_kwargs: further variables of the template.
            lora_request: as for `generate`.
            of_vllm: vLLM's other arguments, refused by name unless they ask for nothing.
        """
        prompts = [
            self.chat_prompt(
                conversation,
                chat_template=chat_template,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                tools=tools,
                chat_template_kwargs=chat_template_kwargs,
                **of_vllm,
            )
            for conversation in as_conversations(messages)
        ]
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm, lora_request=lora_request)
