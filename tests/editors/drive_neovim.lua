-- Drives Neovim headless through the whole path: diagnostics, search, apply, undo, redo, restore. What is seen goes as
-- JSON into the file that DRIVE_LOG names. DRIVE_PLUGIN is the client's folder, DRIVE_FILE the user's file, DRIVE_CMD the
-- server's command line and DRIVE_SETTINGS the settings, both as JSON.
local seen = { progress = {}, messages = {}, steps = {} }
local limit_ms = 240000

local function finish(fault)
  seen.fault = fault
  vim.fn.writefile({ vim.json.encode(seen) }, os.getenv("DRIVE_LOG"))
  vim.cmd("qall!")
end

local function wait(what, ready)
  if not vim.wait(limit_ms, ready, 50) then
    error("waited in vain for " .. what)
  end
end

local function text()
  return table.concat(vim.api.nvim_buf_get_lines(0, 0, -1, false), "\n") .. "\n"
end

local function action(kind)
  local found = false
  wait(kind, function()
    local answers = vim.lsp.buf_request_sync(0, "textDocument/codeAction", {
      textDocument = vim.lsp.util.make_text_document_params(),
      range = { start = { line = vim.fn.line(".") - 1, character = 0 }, ["end"] = { line = vim.fn.line(".") - 1, character = 0 } },
      context = { diagnostics = {}, only = { kind } },
    }, 20000) or {}
    for _, answer in pairs(answers) do
      found = found or #(answer.result or {}) > 0
    end
    return found
  end)
  vim.lsp.buf.code_action({ apply = true, context = { only = { kind }, diagnostics = {} } })
end

local function drive()
  vim.opt.runtimepath:append(os.getenv("DRIVE_PLUGIN"))
  vim.opt.swapfile = false
  vim.lsp.handlers["window/showMessage"] = function(_, params)
    table.insert(seen.messages, params.message)
    return vim.NIL
  end
  vim.lsp.handlers["$/progress"] = function(_, params)
    table.insert(seen.progress, params.value)
    return vim.NIL
  end
  require("drk").setup({ cmd = vim.json.decode(os.getenv("DRIVE_CMD")), settings = vim.json.decode(os.getenv("DRIVE_SETTINGS")) })
  vim.cmd("edit " .. vim.fn.fnameescape(os.getenv("DRIVE_FILE")))
  vim.bo.filetype = "python"
  wait("attach", function()
    return #require("drk").clients(0) > 0
  end)
  wait("diagnostics", function()
    return #vim.diagnostic.get(0) > 0
  end)
  seen.diagnostics = vim.tbl_map(function(one)
    return { code = one.code, line = one.lnum, message = one.message, severity = one.severity }
  end, vim.diagnostic.get(0))
  local original = text()
  vim.fn.search("^class " .. (os.getenv("DRIVE_CLASS") or "Net"))
  action("refactor.rewrite.drk.fuse")
  wait("the search's end", function()
    return #seen.progress > 0 and seen.progress[#seen.progress].kind == "end"
  end)
  action("refactor.rewrite.drk.apply")
  wait("the edit", function()
    return text() ~= original
  end)
  seen.applied = text()
  wait("saved files", function()
    local folder = vim.fs.dirname(os.getenv("DRIVE_FILE"))
    return vim.fn.getfsize(folder .. "/model_kernels.py") > 0 and vim.fn.getfsize(folder .. "/test_model_kernels.py") > 0
  end)
  seen.saved = not vim.bo.modified
  if os.getenv("DRIVE_CHECK") then
    seen.check = vim.fn.system(os.getenv("DRIVE_CHECK"))
    seen.check_code = vim.v.shell_error
  end
  vim.cmd("silent undo")
  seen.undone = text() == original
  vim.cmd("silent redo")
  vim.cmd("silent write")
  vim.fn.search("^class " .. (os.getenv("DRIVE_CLASS") or "Net"))
  action("refactor.rewrite.drk.restore")
  wait("the restored text", function()
    return text() == original
  end)
  seen.restored = true
end

local done, fault = xpcall(drive, debug.traceback)
finish(not done and fault or nil)
