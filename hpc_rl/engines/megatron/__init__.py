"""The engine on Megatron-core: tensor, pipeline, context and expert parallelism."""
