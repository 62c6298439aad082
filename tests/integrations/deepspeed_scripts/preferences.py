"""DPO by TRL with a reference model that is given, synchronised during training.

    deepspeed preferences.py --model_name_or_path DIR --output_dir OUT --deepspeed FILE ...
"""

import dataclasses
import json
import pathlib

import transformers
import trl
from datasets import load_dataset


@dataclasses.dataclass
class ScriptArguments:
    model_name_or_path: str
    reference: str
    dataset: str


def main(argv=None):
    parser = transformers.HfArgumentParser((ScriptArguments, trl.DPOConfig))
    script_args, training_args = parser.parse_args_into_dataclasses(argv)
    model = transformers.AutoModelForCausalLM.from_pretrained(script_args.model_name_or_path)
    reference = transformers.AutoModelForCausalLM.from_pretrained(script_args.reference)
    trainer = trl.DPOTrainer(
        model,
        ref_model=reference,
        args=training_args,
        train_dataset=load_dataset(script_args.dataset, split="train"),
        processing_class=transformers.AutoTokenizer.from_pretrained(script_args.model_name_or_path),
    )
    trainer.train(resume_from_checkpoint=training_args.resume_from_checkpoint)
    trainer.save_model()
    found = {"log": trainer.state.log_history}
    out = pathlib.Path(training_args.output_dir)
    (out / f"found-{trainer.args.process_index}.json").write_text(json.dumps(found))
    trainer.end()


if __name__ == "__main__":
    main()
