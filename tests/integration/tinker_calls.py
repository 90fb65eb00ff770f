"""Every call of Tinker's SDK, by its own client: `python tinker_calls.py MODEL`. What it saw is the last line, JSON. It runs in the SDK's environment."""

import json
import sys
import warnings

import numpy as np
import tinker
from tinker import types

warnings.simplefilter("error")


def datum(**inputs):
    given = {name: np.array(values, np.float32) for name, values in (inputs or {"weights": [1, 1, 1]}).items()}
    return types.Datum(model_input=types.ModelInput.from_ints([1, 2, 3]), loss_fn_inputs={"target_tokens": np.array([2, 3, 4]), **given})


def main(name):
    seen = {}
    rest, service = tinker.RestClient(), tinker.ServiceClient()
    seen["models"] = [each.model_name for each in rest.get_server_capabilities().result().supported_models]
    client = service.create_lora_training_client(base_model=name, rank=8, seed=3).result()
    seen["info"] = [client.get_info().model_data.model_name, client.get_info().lora_rank]
    seen["vocabulary"] = len(client.get_tokenizer())

    # steps, pipelined: the second is on its way before the first is waited for
    pairs = [
        (client.forward_backward([datum()] * 3, "cross_entropy"), client.optim_step(types.AdamParams(learning_rate=0.01))) for _ in range(3)
    ]
    seen["losses"] = [learned.result().metrics["loss:sum"] for learned, _ in pairs]
    seen["norms"] = [stepped.result().metrics["grad_norm"] for _, stepped in pairs]
    policy = [datum(logprobs=[-3, -3, -3], advantages=[1, 0, -1])]
    seen["policy"] = {
        loss: client.forward_backward(policy, loss).result().metrics["loss:sum"]
        for loss in ("importance_sampling", "ppo", "cispo", "dro", "gspo")
    }
    config = {"clip_low_threshold": 0.9, "clip_high_threshold": 1.1}
    seen["clipped"] = client.forward_backward(policy, "ppo", loss_fn_config=config).result().metrics["loss:sum"]
    outputs = client.forward([datum()], "cross_entropy").result().loss_fn_outputs[0]
    seen["logprobs"] = outputs["logprobs"].tolist()
    custom = client.forward_backward_custom(
        [datum()], lambda data, logprobs: (-sum(each.sum() for each in logprobs), {"mine": 1.0})
    ).result()
    seen["custom"] = custom.metrics["loss:sum"]
    client.optim_step(types.AdamParams(learning_rate=0.0, grad_clip_norm=1.0, weight_decay=0.01)).result()

    # what is saved
    state = client.save_state("one").result().path
    sampler_path = client.save_weights_for_sampler("one").result().path
    seen["paths"] = [path.split("/", 3)[3] for path in (state, sampler_path)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        client.load_state(state).result()
        client.load_state_with_optimizer(state).result()
    again = [
        service.create_training_client_from_state(state).result(),
        service.create_training_client_from_state_with_optimizer(state).result(),
    ]
    seen["again"] = [each.forward([datum()], "cross_entropy").result().loss_fn_outputs[0]["logprobs"].tolist() for each in again]
    seen["weights_info"] = rest.get_weights_info_by_tinker_path(state).result().lora_rank

    # sampling
    prompt, params = types.ModelInput.from_ints([1, 2, 3]), types.SamplingParams(max_tokens=5, seed=7)
    samplers = {
        "base": service.create_sampling_client(base_model=name).result(),
        "named": service.create_sampling_client(model_path=sampler_path).result(),
        "snapshot": client.save_weights_and_get_sampling_client().result(),
        "inflight": client.save_weights_and_get_sampling_client(kind="inflight").result(),
    }
    for kind, sampler in samplers.items():
        told = sampler.sample(prompt, 3, params, include_prompt_logprobs=True).result()
        seen[kind] = [[each.tokens, each.logprobs] for each in told.sequences]
        seen[f"{kind} prompt"] = told.prompt_logprobs[1:]
    seen["scores"] = samplers["snapshot"].compute_logprobs(types.ModelInput.from_ints([1, 2, 3])).result()[1:]
    seen["greedy"] = [
        samplers["snapshot"].sample(prompt, 1, types.SamplingParams(max_tokens=3, temperature=0.0)).result().sequences[0].tokens
        for _ in range(2)
    ]
    seen["top"] = (
        samplers["base"].sample(prompt, 1, params, include_prompt_logprobs=True, topk_prompt_logprobs=2).result().topk_prompt_logprobs
        is not None
    )
    handle = samplers["named"].get_sampler_handle()
    seen["handle"] = len(tinker.SamplingClient.from_sampler_handle(handle).sample(prompt, 1, params).result().sequences)

    # errors, by the SDK's types; nothing is lost by them
    seen["errors"] = {}
    for kind, call in {
        "loss": lambda: client.forward_backward([datum()], "nonsense"),
        "shape": lambda: client.forward_backward([datum(weights=[1, 1])], "cross_entropy"),
        "token": lambda: client.forward_backward(
            [
                types.Datum(
                    model_input=types.ModelInput.from_ints([10**6]),
                    loss_fn_inputs={"target_tokens": np.array([1]), "weights": np.ones(1, np.float32)},
                )
            ],
            "cross_entropy",
        ),
        "path": lambda: service.create_training_client_from_state("tinker://nothing/weights/there"),
        "model": lambda: service.create_lora_training_client(base_model="another/one"),
        "top_k": lambda: samplers["base"].sample(prompt, 1, types.SamplingParams(max_tokens=2, top_k=3)),
        "absent": lambda: client.save_weights_external("x"),
    }.items():
        try:
            call().result()
        except tinker.TinkerError as error:
            seen["errors"][kind] = [type(error).__name__, str(getattr(error, "category", ""))]
    return seen, client, service


if __name__ == "__main__":
    seen, client, service = main(sys.argv[1])
    service.close("success").result()
    print(json.dumps(seen))
