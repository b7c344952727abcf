-- drk in Neovim: starts the server, adds commands, saves what an applied edit created.
--
-- Works on Neovim 0.8 and later; with 0.11 and later `vim.lsp.enable("drk")` is enough. Everything is plain LSP:
-- diagnostics, code actions (vim.lsp.buf.code_action), code lenses, inlay hints, hover.
local M = {}

local label = "drk: "

-- Why an edit cannot be made as a whole, or nil. Neovim itself would make the rest of it and call that applied.
local function obstacle(change_list)
  for _, change in ipairs(change_list) do
    local document = change.textDocument
    local buffer = document and vim.fn.bufnr(vim.uri_to_fname(document.uri)) or -1
    if buffer > 0 and vim.api.nvim_buf_is_loaded(buffer) then
      local name = vim.fs.basename(vim.api.nvim_buf_get_name(buffer))
      local version = document.version
      if type(version) == "number" and version > 0 and ((vim.lsp.util.buf_versions or {})[buffer] or 0) > version then
        return name .. " was changed meanwhile"
      elseif not vim.bo[buffer].modifiable then
        return name .. " cannot be changed here ('nomodifiable')"
      end
    end
  end
  return nil
end

-- Files that drk creates or edits are saved when they were not modified before: kernels in an unsaved buffer would be
-- missing for whoever imports them.
local function apply_edit(error, params, context, config)
  local edited, created = {}, {}
  local change_list = params and params.edit and params.edit.documentChanges or {}
  local reason = obstacle(change_list)
  if reason then
    return { applied = false, failureReason = reason }
  end
  for _, change in ipairs(change_list) do
    local uri = change.uri or (change.textDocument and change.textDocument.uri)
    if uri and change.kind ~= "delete" then
      local buffer = vim.fn.bufnr(vim.uri_to_fname(uri))
      local modified = buffer > 0 and vim.api.nvim_buf_is_loaded(buffer) and vim.bo[buffer].modified
      edited[uri] = not modified
      created[uri] = created[uri] or change.kind == "create"
    end
  end
  local result = vim.lsp.handlers["workspace/applyEdit"](error, params, context, config)
  if M.options.save and vim.startswith(params.label or "", label) and type(result) == "table" and result.applied then
    for uri, clean in pairs(edited) do
      local buffer = vim.uri_to_bufnr(uri)
      if clean and vim.api.nvim_buf_is_loaded(buffer) then
        vim.api.nvim_buf_call(buffer, function()
          if created[uri] and vim.fn.line("$") > 1 and vim.fn.getline("$") == "" then
            vim.cmd("silent undojoin | $delete _") -- the empty line of the new buffer, behind the text's own line end
          end
          vim.cmd("silent noautocmd write!")
          vim.bo.modified = false
        end)
        for _, client in ipairs(M.clients(buffer)) do
          client.notify("textDocument/didSave", { textDocument = { uri = uri } })
        end
      end
    end
  end
  return result
end

M.options = {
  cmd = { "drk", "lsp" },
  save = true, -- save files that an applied edit made or changed
  trusted = true, -- false: show stored profiles only, run and write nothing
  settings = {}, -- as in docs/editors.md: { minShare = 0.05, device = "interpret", ... }
}

-- The running drk clients of a buffer.
function M.clients(buffer)
  local get = vim.lsp.get_clients or vim.lsp.get_active_clients
  return get({ bufnr = buffer, name = "drk" })
end

-- The client configuration, for vim.lsp.config, vim.lsp.enable and vim.lsp.start.
function M.config()
  return {
    name = "drk",
    cmd = M.options.cmd,
    filetypes = { "python" },
    root_markers = { ".drk", "drk.toml", "pyproject.toml", ".git" },
    settings = { drk = M.options.settings },
    init_options = { trusted = M.options.trusted, settings = M.options.settings },
    handlers = { ["workspace/applyEdit"] = apply_edit },
  }
end

local function root_of(buffer)
  local name = vim.api.nvim_buf_get_name(buffer)
  local found = vim.fs.find({ ".drk", "drk.toml", "pyproject.toml", ".git" }, { upward = true, path = vim.fs.dirname(name) })
  return found[1] and vim.fs.dirname(found[1]) or vim.fs.dirname(name)
end

local function execute(command, argument)
  local buffer = vim.api.nvim_get_current_buf()
  local client = M.clients(buffer)[1]
  if not client then
    vim.notify("drk: no server for this buffer", vim.log.levels.WARN)
    return
  end
  argument.uri = vim.uri_from_bufnr(buffer)
  client.request("workspace/executeCommand", { command = command, arguments = { argument } }, function(error, result)
    if error then
      vim.notify("drk: " .. error.message, vim.log.levels.ERROR)
    elseif command == "drk.status" then
      vim.notify(vim.inspect(result))
    end
  end, buffer)
end

-- Run a command of the server on the current buffer: optimize, profile, apply, restore, diff, resume, cancel,
-- openReport, status. The target, where there is one, is a name in the file, such as Net.
function M.run(name, target)
  execute("drk." .. name, { target = target })
end

local function commands()
  local names = { "optimize", "profile", "apply", "restore", "diff", "resume", "cancel", "openReport", "status" }
  vim.api.nvim_create_user_command("Drk", function(given)
    M.run(given.fargs[1], given.fargs[2])
  end, {
    nargs = "+",
    desc = "drk: optimize, profile, apply, restore, ...",
    complete = function()
      return names
    end,
  })
end

local function refresh_lenses()
  for _, client in ipairs((vim.lsp.get_clients or vim.lsp.get_active_clients)({ name = "drk" })) do
    for buffer in pairs(client.attached_buffers or {}) do
      if vim.lsp.codelens and vim.api.nvim_buf_is_loaded(buffer) then
        vim.lsp.codelens.refresh({ bufnr = buffer })
      end
    end
  end
end

-- Set drk up. Options are those of M.options.
function M.setup(options)
  M.options = vim.tbl_deep_extend("force", M.options, options or {})
  commands()
  local group = vim.api.nvim_create_augroup("drk", { clear = true })
  if vim.fn.exists("##LspProgress") == 1 then
    -- Neovim has no handler for workspace/codeLens/refresh up to 0.11: a job's end shows its lenses anew.
    vim.api.nvim_create_autocmd("LspProgress", { group = group, pattern = "end", callback = refresh_lenses })
  end
  if vim.lsp.config and vim.lsp.enable then
    vim.lsp.config("drk", M.config())
    vim.lsp.enable("drk")
    return
  end
  vim.api.nvim_create_autocmd("FileType", {
    group = group,
    pattern = "python",
    callback = function(event)
      local config = M.config()
      config.root_dir = root_of(event.buf)
      vim.lsp.start(config, { bufnr = event.buf })
    end,
  })
end

return M
