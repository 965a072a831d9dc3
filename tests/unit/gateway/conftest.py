from atropos_services import folder, serve
from chat_tokenizers import chat_tokenizer, tokenizer

__all__ = ["chat_tokenizer", "folder", "serve", "tokenizer"]
