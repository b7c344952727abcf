-- Drives Neovim headless through one of the scenarios below. What is seen goes as JSON into the file that DRIVE_LOG names.
-- DRIVE_SCENARIO is the scenario's name, DRIVE_PLUGIN the client's folder, DRIVE_FILE the user's file, DRIVE_CMD the
-- server's command line and DRIVE_SETTINGS the settings, both as JSON.
local seen = { progress = {}, messages = {}, steps = {} }
local limit_ms = tonumber(os.getenv("DRIVE_LIMIT_MS") or "240000")

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

local function warn(message)
  table.insert(seen.messages, message)
end

-- Set the client up and open the file.
local function open()
  vim.opt.runtimepath:append(os.getenv("DRIVE_PLUGIN"))
  vim.opt.swapfile = false
  vim.notify = warn
  vim.lsp.handlers["window/showMessage"] = function(_, params)
    warn(params.message)
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
end

local function see_diagnostics()
  wait("diagnostics", function()
    return #vim.diagnostic.get(0) > 0
  end)
  seen.diagnostics = vim.tbl_map(function(one)
    return { code = one.code, line = one.lnum, message = one.message, severity = one.severity }
  end, vim.diagnostic.get(0))
end

local function wait_for_end(count)
  wait("the end of job " .. count, function()
    local ends = vim.tbl_filter(function(value)
      return value.kind == "end"
    end, seen.progress)
    return #ends >= count
  end)
end

local function at_class()
  vim.fn.search("^class " .. (os.getenv("DRIVE_CLASS") or "Net"))
end

local scenarios = {}

-- Nothing is stored: the editor's own command profiles the file, diagnostics appear, the report's page is opened.
function scenarios.profile()
  vim.ui.open = function(path)
    seen.opened = path
    return { wait = function() end }, nil
  end
  open()
  seen.before = #vim.diagnostic.get(0)
  vim.cmd("Drk profile")
  see_diagnostics()
  wait_for_end(1)
  vim.cmd("Drk openReport")
  wait("the report's page", function()
    return seen.opened ~= nil
  end)
end

-- The server is killed in the middle of a search; when the file is opened anew, what was found is offered.
function scenarios.killed()
  open()
  local original = text()
  at_class()
  action("refactor.rewrite.drk.fuse")
  wait("the second turn", function()
    return #seen.progress > 0 and vim.startswith(seen.progress[#seen.progress].message or "", "turn 2/2")
  end)
  vim.uv.kill(tonumber(vim.fn.readfile(os.getenv("DRIVE_PID"))[1]), "sigkill")
  wait("the client's end", function()
    return #require("drk").clients(0) == 0
  end)
  seen.kept = text() == original
  vim.cmd("Drk apply")
  vim.cmd("edit")
  wait("a second server", function()
    return #require("drk").clients(0) > 0
  end)
  at_class()
  action("refactor.rewrite.drk.apply")
  wait("the edit", function()
    return text() ~= original
  end)
  seen.applied = text()
end

-- The text moves on, or cannot be changed, while an edit is on its way: nothing is half done.
function scenarios.refused()
  open()
  local client = require("drk").clients(0)[1]
  local original, uri = text(), vim.uri_from_bufnr(0)
  local beside = vim.uri_from_fname(vim.fs.dirname(os.getenv("DRIVE_FILE")) .. "/model_kernels.py")
  local start = { line = 0, character = 0 }
  local function ask(version)
    local edits = { { range = { start = start, ["end"] = start }, newText = "import nothing\n" } }
    local changes = {
      { kind = "create", uri = beside },
      { textDocument = { uri = uri, version = version }, edits = edits },
    }
    local params = { label = "drk: a test", edit = { documentChanges = changes } }
    local context = { client_id = client.id, method = "workspace/applyEdit" }
    return client.handlers["workspace/applyEdit"](nil, params, context, {})
  end
  vim.api.nvim_buf_set_lines(0, -1, -1, false, { "# more" })
  local changed = text()
  seen.stale = ask(vim.lsp.util.buf_versions[vim.api.nvim_get_current_buf()] - 1)
  seen.stale_kept = text() == changed
  vim.bo.modifiable = false
  seen.fixed = ask(vim.NIL)
  seen.fixed_kept = text() == changed
  vim.cmd("Drk apply")
  wait("a message", function()
    return #seen.messages > 0
  end)
  seen.still = text() == changed
  vim.bo.modifiable = true
  vim.cmd("silent undo")
  seen.undone = text() == original
end

-- Diagnostics, search, apply, undo, redo, restore.
function scenarios.whole()
  open()
  if os.getenv("DRIVE_CHECK") then
    vim.cmd("Drk profile")
    wait_for_end(1)
  end
  see_diagnostics()
  local jobs = os.getenv("DRIVE_CHECK") and 1 or 0
  local original = text()
  at_class()
  action("refactor.rewrite.drk.fuse")
  wait_for_end(jobs + 1)
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
  at_class()
  action("refactor.rewrite.drk.restore")
  wait("the restored text", function()
    return text() == original
  end)
  seen.restored = true
end

local done, fault = xpcall(scenarios[os.getenv("DRIVE_SCENARIO")], debug.traceback)
finish(not done and fault or nil)
