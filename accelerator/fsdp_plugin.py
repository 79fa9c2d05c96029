"""``FullyShardedDataParallelPlugin``: how an Accelerator shards a model."""

from __future__ import annotations

from ..strategies.fsdp.settings import FSDPSettings


class FullyShardedDataParallelPlugin(FSDPSettings):
    """Weights, gradients and optimizer state sharded over processes, by torch's ``fully_shard`` (FSDP2).

    Fields of FSDP 1 that have a meaning in FSDP2 are translated; one note names those that have none. A field that is
    None is decided by the settings (``fsdp_...``).

    Args:
        fsdp_version: 1 is accepted and runs as 2.
        sharding_strategy: ``"FULL_SHARD"``, ``"SHARD_GRAD_OP"`` (keep weights from forward to backward),
            ``"HYBRID_SHARD"`` (shard within a machine) or ``"HYBRID_SHARD_ZERO2"``.
        reshard_after_forward: False keeps weights from forward to backward; or a ``sharding_strategy``.
        backward_prefetch: FSDP2 always fetches the next block's weights while backward computes.
        mixed_precision_policy: a ``MixedPrecisionPolicy`` in the place of autocast; also FSDP 1's, a dict of its
            arguments, or ``"bf16"``, ``"fp16"`` for everything.
        auto_wrap_policy: ``"transformer_based_wrap"``, ``"size_based_wrap"``, ``"no_wrap"`` or a policy of
            torch.distributed.fsdp.wrap; None: the repeated block.
        cpu_offload: keep shards and optimizer state in the host's memory.
        ignored_modules: not supported.
        state_dict_type: ``"FULL_STATE_DICT"`` (checkpoints are one file) or ``"SHARDED_STATE_DICT"`` (each process
            writes its part).
        state_dict_config: accepted; whole states are gathered on the CPU of rank 0.
        optim_state_dict_config: the same.
        limit_all_gathers: FSDP2 always does.
        use_orig_params: FSDP2 always does.
        param_init_fn: not supported: layers on the meta device fill themselves, by ``reset_parameters``.
        sync_module_states: FSDP always starts from rank 0's weights.
        forward_prefetch: FSDP2 fetches as the host runs ahead.
        activation_checkpointing: run the forward of each block again in backward.
        activation_checkpointing_offload: not supported.
        cpu_ram_efficient_loading: without effect: build the model on the meta device instead.
        transformer_cls_names_to_wrap: class names of the blocks, a list or comma separated.
        min_num_params: least parameters of a block, for ``"size_based_wrap"``.
    """
