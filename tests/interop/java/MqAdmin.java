import java.io.BufferedReader;
import java.io.ByteArrayOutputStream;
import java.io.InputStreamReader;
import java.io.PrintStream;
import java.nio.charset.StandardCharsets;
import org.apache.rocketmq.tools.command.MQAdminStartup;

/**
 * Stock mqadmin, one command per line of stdin, in one JVM: a start of its own for each takes seconds.
 * A line {"command", "output", "error"} for each; command words are separated by tabs.
 */
public final class MqAdmin {
    public static void main(String[] args) throws Exception {
        PrintStream stdout = System.out;
        PrintStream stderr = System.err;
        BufferedReader commands = new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8));
        for (String line = commands.readLine(); line != null; line = commands.readLine()) {
            ByteArrayOutputStream output = new ByteArrayOutputStream();
            ByteArrayOutputStream error = new ByteArrayOutputStream();
            System.setOut(new PrintStream(output, true, "UTF-8"));
            System.setErr(new PrintStream(error, true, "UTF-8"));
            try {
                MQAdminStartup.main0(line.split("\t"), null);
            } catch (Throwable thrown) {
                thrown.printStackTrace();
            } finally {
                System.setOut(stdout);
                System.setErr(stderr);
            }
            Lines.print("command", line, "output", output.toString("UTF-8"), "error", error.toString("UTF-8"));
        }
        System.exit(0);
    }
}
