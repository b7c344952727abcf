-- Configuration for vim.lsp.enable("drk") (Neovim 0.11 and later): put this folder on the runtimepath.
return require("drk").config()
