"""Train by a loop of one's own, with an Accelerator that has DeepSpeed's configuration.

    accelerate launch --use_deepspeed ... loop.py MODEL OUT [--config ds_config.json] ...
"""

import argparse
import json
import pathlib

import accelerate
import torch
import transformers


def batches(accelerator, count):
    drawn = torch.Generator().manual_seed(5)
    tokens = torch.randint(0, 64, (2 * count * accelerator.num_processes, 8), generator=drawn)
    rows = [{"input_ids": row, "labels": row} for row in tokens]
    return torch.utils.data.DataLoader(rows, batch_size=2)


def optimizer_of(args, model):
    if args.dummy:
        optimizer = accelerate.utils.DummyOptim(model.parameters(), lr=args.lr)
        return optimizer, accelerate.utils.DummyScheduler(
            optimizer, total_num_steps=args.steps, warmup_num_steps=2
        )
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    return optimizer, torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.5, total_iters=args.steps)


def main(argv=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("out", type=pathlib.Path)
    parser.add_argument("--config", help="of DeepSpeed; without it as the environment says")
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--dummy", action="store_true", help="the file has optimizer and scheduler")
    parser.add_argument("--save", type=int, default=0)
    parser.add_argument("--resume", type=pathlib.Path)
    args = parser.parse_args(argv)

    plugin = accelerate.DeepSpeedPlugin(
        hf_ds_config=args.config, gradient_accumulation_steps=args.accumulate
    ) if args.config else None
    accelerator = accelerate.Accelerator(
        deepspeed_plugin=plugin, gradient_accumulation_steps=args.accumulate
    )
    accelerate.utils.set_seed(3)
    model = transformers.AutoModelForCausalLM.from_pretrained(args.model)
    optimizer, scheduler = optimizer_of(args, model)
    loader = batches(accelerator, args.steps * args.accumulate)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    if args.resume:
        accelerator.load_state(args.resume)
    model.train()
    losses, norms, rates, done = [], [], [], 0
    for batch in loader:
        if args.resume and done < args.save * args.accumulate:
            done += 1
            continue
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 1.0)))
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        losses.append(loss.item())
        rates.append(scheduler.get_last_lr()[0])
        done += 1
        if args.save and not args.resume and done == args.save * args.accumulate:
            accelerator.save_state(args.out / "state")
    unwrapped = accelerator.unwrap_model(model)
    weights = accelerator.get_state_dict(model)
    unwrapped.save_pretrained(
        args.out / "model", is_main_process=accelerator.is_main_process, state_dict=weights,
        save_function=accelerator.save,
    )
    found = {"losses": losses, "norms": norms, "rates": rates}
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / f"found-{accelerator.process_index}.json").write_text(json.dumps(found))
    accelerator.wait_for_everyone()
    accelerator.end_training()


if __name__ == "__main__":
    main()
