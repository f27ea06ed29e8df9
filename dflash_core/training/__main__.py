from dflash_core.training.commands import main

main()
