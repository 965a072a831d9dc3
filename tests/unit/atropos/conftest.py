from atropos_services import folder, quick, serve
from chat_tokenizers import chat_tokenizer, tokenizer

__all__ = ["chat_tokenizer", "folder", "quick", "serve", "tokenizer"]
