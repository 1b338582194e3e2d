"""Training by a plan from within other tools: transformers, peft, accelerate, Lightning.

``import fxpart`` imports none of these modules. Each needs the package that it is named after.
"""
